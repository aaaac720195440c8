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
#include <optional>

#include "tests/gpu/simulated/accesses.h"
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
  Accesses accesses;
  int64_t generation;
  int stream;
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
  TORCH_CHECK(byte <= found->first + found->second.accesses.bytes(),
              "the simulated GPU has no such memory");
  return found;
}

void UseMemory(State& state, int stream, const Use& use) {
  if (use.address == nullptr) return;
  const auto found = Find(state, use.address);
  Accesses& accesses = found->second.accesses;
  const auto begin = static_cast<size_t>(static_cast<const char*>(use.address) - found->first);
  const std::optional<int> other =
      use.bytes == 0
          ? accesses.Add(0, accesses.bytes(), use.writes, stream, state.streams[stream].before)
          : accesses.Add(begin, begin + use.bytes, use.writes, stream,
                         state.streams[stream].before);
  if (other.has_value()) End(use.writes ? "writes to memory" : "reads memory", stream, *other);
}

// Whether another stream of the device, no default one and no group's either, has work behind the
// host.
bool HasWorkBeside(const State& state, int stream) {
  if (stream % kStreamsOfDevice == 0 || HasHighPriority(stream)) return false;
  const int first = stream / kStreamsOfDevice * kStreamsOfDevice;
  for (int other = first + 1; other < first + kFirstOfHighPriority; ++other) {
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
  Progress& before = state.streams[stream].before;
  if (HasHighPriority(event.stream) && !HasHighPriority(stream)) {
    ++TheCounts().of_groups;
    if (before[stream] > event.before[stream]) ++TheCounts().of_groups_beside;
  }
  Join(before, event.before);
}

bool IsDone(const Event& event) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  return event.before[event.stream] <= state.host[event.stream];
}

void Synchronize(const Event& event) {
  RefuseInCapture("a wait of the host");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  State& state = TheState();
  std::vector<Copy> done;
  {
    const std::lock_guard lock(state.mutex);
    Progress awaited = {};
    if (HasHighPriority(event.stream)) {
      awaited[event.stream] = event.before[event.stream];
    } else {
      ++TheCounts().synchronizations;
      Join(state.host, event.before);
      awaited = state.host;
    }
    for (int i = 0; i < kStreams; ++i) {
      std::deque<Copy>& copies = state.streams[i].copies;
      while (!copies.empty() && copies.front().number <= awaited[i]) {
        done.push_back(std::move(copies.front()));
        copies.pop_front();
      }
    }
  }
  for (const Copy& copy : done) Finish(copy);
}

void SynchronizeDevice(c10::DeviceIndex device) {
  Event all = RecordEvent(StreamOf(device, 0));
  for (int id = 1; id < kStreamsOfDevice; ++id) {
    Join(all.before, RecordEvent(StreamOf(device, id)).before);
  }
  Synchronize(all);
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

void AddUses(const at::Tensor& x, bool writes, std::vector<Use>& uses) {
  const auto* const storage = static_cast<const char*>(x.storage().data());
  if (storage == nullptr) return;
  if (x.numel() == 0) return uses.push_back({storage, writes});
  const auto item = static_cast<int64_t>(x.element_size());
  const char* const first = storage + x.storage_offset() * item;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride and size
  int64_t pieces = 1, run = 1, span = 1;                // of elements
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) > 0) dimensions.emplace_back(x.stride(d), x.size(d));
  }
  std::ranges::sort(dimensions);
  for (const auto& [stride, size] : dimensions) {
    span += stride * (size - 1);
    int64_t& grows = stride == run && pieces == 1 ? run : pieces;
    grows *= size;
  }
  constexpr int64_t kMostPieces = 64;
  if (pieces > kMostPieces) {
    return uses.push_back({first, writes, static_cast<size_t>(span * item)});
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t offset = 0, rest = piece, contiguous = 1;
    for (const auto& [stride, size] : dimensions) {
      if (contiguous < run) {
        contiguous *= size;
        continue;
      }
      offset += rest % size * stride;
      rest /= size;
    }
    uses.push_back({first + offset * item, writes, static_cast<size_t>(run * item)});
  }
}

void Launch(std::initializer_list<at::Tensor> reads, std::initializer_list<at::Tensor> writes) {
  ++TheCounts().launches;
  std::vector<Use> uses;
  for (const at::Tensor& x : reads) AddUses(x, /*writes=*/false, uses);
  for (const at::Tensor& x : writes) AddUses(x, /*writes=*/true, uses);
  const at::Tensor& any = reads.size() > 0 ? *reads.begin() : *writes.begin();
  Enqueue(CurrentStream(any.device().index()), uses);
}

void OnShared(const void* address) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  if (!Find(state, address)->second.accesses.WrittenAfter(state.host)) return;
  std::fputs("simulated GPU: memory is shared while a stream may still write to it\n", stderr);
  std::abort();
}

void OnAllocated(const void* address, size_t bytes, int stream) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  state.allocations.insert_or_assign(
      static_cast<const char*>(address),
      Allocation{.accesses = Accesses(bytes), .generation = ++state.generations, .stream = stream});
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
  const std::optional<int> other =
      memory.accesses.UsedAfter(Before(state, memory.stream), memory.recorded);
  if (other.has_value()) End("gets memory back", memory.stream, *other);
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
  return {found->first, found->second.accesses.bytes()};
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
