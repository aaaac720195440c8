#include "tests/gpu/simulated/stream.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/graph.h"

namespace tandem::simulated_gpu {
namespace {

struct Copy {
  int64_t number;   // of the operation in its stream
  at::Tensor to;    // undefined: the device reads `host`
  at::Tensor host;  // pinned, as the device reads it
  at::Tensor values;
};

struct Stream {
  Progress before = {};  // of its next operation; its own entry counts its operations
  std::deque<Copy> copies;
};

struct Allocation {
  size_t bytes = 0;
  int64_t generation = 0;
  int stream = 0;
  int writer = 0;       // the stream that wrote last
  int64_t written = 0;  // the number of that operation
  Progress read = {};   // the last operation of each stream that read
  std::array<bool, kStreams> recorded = {};
};

struct State {
  std::mutex mutex;
  std::array<Stream, kStreams> streams;
  Progress host = {};  // what the host has waited for
  std::map<const char*, Allocation> allocations;
  int64_t generations = 0;
};

// Leaked, as all that libtorch may call while the process ends.
State& TheState() {
  static State& state = *new State;
  return state;
}

thread_local std::array<int, kDevices> current = {};

void Join(Progress& progress, const Progress& other) {
  std::ranges::transform(progress, other, progress.begin(),
                         [](int64_t a, int64_t b) { return std::max(a, b); });
}

[[noreturn]] void End(const char* what, int stream, int other) {
  std::fprintf(stderr,
               "simulated GPU: stream %d of GPU %d %s, which stream %d may still use: no event or "
               "synchronisation orders them\n",
               stream % kStreamsOfDevice, stream / kStreamsOfDevice, what,
               other % kStreamsOfDevice);
  std::abort();
}

// Returns the operations that a stream's next one comes after.
const Progress& Before(State& state, int stream) {
  Progress& before = state.streams[stream].before;
  Join(before, state.host);
  return before;
}

std::map<const char*, Allocation>::iterator Find(State& state, const void* address) {
  const auto* const byte = static_cast<const char*>(address);
  auto found = state.allocations.upper_bound(byte);
  TORCH_CHECK(found != state.allocations.begin(), "the simulated GPU has no such memory");
  --found;
  // An empty tensor may stand at the end.
  TORCH_CHECK(byte <= found->first + found->second.bytes, "the simulated GPU has no such memory");
  return found;
}

void UseMemory(State& state, int stream, const Use& use) {
  if (use.address == nullptr) return;
  Allocation& memory = Find(state, use.address)->second;
  const Progress& before = state.streams[stream].before;
  const char* const what = use.writes ? "writes to memory" : "reads memory";
  if (memory.written > before[memory.writer]) End(what, stream, memory.writer);
  if (!use.writes) {
    memory.read[stream] = before[stream];
    return;
  }
  for (int other = 0; other < kStreams; ++other) {
    if (memory.read[other] > before[other]) End(what, stream, other);
  }
  memory.writer = stream;
  memory.written = before[stream];
}

// Whether another stream of the device, no default one either, has work behind the host.
bool HasWorkBeside(const State& state, int stream) {
  if (stream % kStreamsOfDevice == 0) return false;
  const int first = stream / kStreamsOfDevice * kStreamsOfDevice;
  for (int other = first + 1; other < first + kStreamsOfDevice; ++other) {
    if (other != stream && state.streams[other].before[other] > state.host[other]) return true;
  }
  return false;
}

// Whether the host has yet to wait for what a stream, no default one, copies to it.
bool OwesTheHost(const State& state, int stream) {
  return stream % kStreamsOfDevice != 0 &&
         std::ranges::any_of(state.streams[stream].copies,
                             [](const Copy& copy) { return copy.to.defined(); });
}

void Finish(const Copy& copy) {
  if (copy.to.defined()) {
    copy.to.copy_(copy.values);
  } else if (!at::equal(copy.host.view(at::kByte), copy.values.view(at::kByte))) {
    std::fputs("simulated GPU: the host wrote to pinned memory that a copy still reads\n", stderr);
    std::abort();
  }
}

void Add(int stream, Copy copy) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  copy.number = state.streams[stream].before[stream];
  state.streams[stream].copies.push_back(std::move(copy));
}

}  // namespace

Counts& TheCounts() {
  static Counts& counts = *new Counts;
  return counts;
}

int CurrentStream(c10::DeviceIndex device) { return StreamOf(device, current[device]); }

void SetCurrentStream(int stream) {
  current[stream / kStreamsOfDevice] = stream % kStreamsOfDevice;
}

Event RecordEvent(int stream) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  return {.stream = stream, .before = Before(state, stream), .graph = CapturedGraph()};
}

void WaitForEvent(int stream, const Event& event) {
  if (event.graph != CapturedGraph()) {
    std::fputs("simulated GPU: a wait for an event of a capture, or in one for one of none\n",
               stderr);
    std::abort();
  }
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  Join(state.streams[stream].before, event.before);
}

bool IsDone(const Event& event) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  return event.before[event.stream] <= state.host[event.stream];
}

void Synchronize(const Event& event) {
  RefuseInCapture("a wait of the host");
  ++TheCounts().synchronizations;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  State& state = TheState();
  std::vector<Copy> done;
  {
    const std::lock_guard lock(state.mutex);
    Join(state.host, event.before);
    for (int i = 0; i < kStreams; ++i) {
      std::deque<Copy>& copies = state.streams[i].copies;
      while (!copies.empty() && copies.front().number <= state.host[i]) {
        done.push_back(std::move(copies.front()));
        copies.pop_front();
      }
    }
  }
  for (const Copy& copy : done) Finish(copy);
}

void Enqueue(int stream, const std::vector<Use>& uses) {
  UseInCapture(stream, uses);
  if (IsCapturing()) return;
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  Before(state, stream);
  ++state.streams[stream].before[stream];
  if (HasWorkBeside(state, stream)) ++TheCounts().beside;
  if (OwesTheHost(state, stream)) ++TheCounts().ahead;
  for (const Use& use : uses) UseMemory(state, stream, use);
}

void Launch(std::initializer_list<at::Tensor> reads, std::initializer_list<at::Tensor> writes) {
  ++TheCounts().launches;
  std::vector<Use> uses;
  for (const at::Tensor& x : reads) uses.push_back({x.storage().data(), /*writes=*/false});
  for (const at::Tensor& x : writes) uses.push_back({x.storage().data(), /*writes=*/true});
  const at::Tensor& any = reads.size() > 0 ? *reads.begin() : *writes.begin();
  Enqueue(CurrentStream(any.device().index()), uses);
}

void OnShared(const void* address) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  const Allocation& memory = Find(state, address)->second;
  if (memory.written <= state.host[memory.writer]) return;
  std::fputs("simulated GPU: memory is shared while a stream may still write to it\n", stderr);
  std::abort();
}

void OnAllocated(const void* address, size_t bytes, int stream) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  state.allocations[static_cast<const char*>(address)] = {
      .bytes = bytes, .generation = ++state.generations, .stream = stream};
}

void OnRecorded(const void* address, int stream) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  Find(state, address)->second.recorded[stream] = true;
}

void OnFreed(const void* address) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  const auto found = Find(state, address);
  const Allocation& memory = found->second;
  const Progress& before = Before(state, memory.stream);
  for (int other = 0; other < kStreams; ++other) {
    const int64_t last =
        std::max(memory.read[other], memory.writer == other ? memory.written : int64_t{0});
    if (last > before[other] && !memory.recorded[other]) {
      End("gets memory back", memory.stream, other);
    }
  }
  state.allocations.erase(found);
}

int64_t GenerationOf(const void* address) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  const auto found = state.allocations.find(static_cast<const char*>(address));
  return found == state.allocations.end() ? 0 : found->second.generation;
}

std::pair<const void*, size_t> AllocationOf(const void* address) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  const auto found = Find(state, address);
  return {found->first, found->second.bytes};
}

void DeliverLater(int stream, const at::Tensor& to, const at::Tensor& values) {
  if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), kUnwritten, to.nbytes());
  Add(stream, {.number = 0, .to = to, .host = {}, .values = values});
}

void ReadLater(int stream, const at::Tensor& from) {
  const at::Tensor host = from.contiguous();
  if (!host.is_alias_of(from)) return;  // libtorch made a copy that nobody else writes to
  Add(stream, {.number = 0, .to = {}, .host = host.flatten(), .values = host.flatten().clone()});
}

}  // namespace tandem::simulated_gpu
