#include "tests/gpu/simulated/graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::simulated_gpu {
namespace {

struct Graph {
  // Memory from before that the operations use: its generation, and whether they write there.
  struct Used {
    int64_t generation = 0;
    bool writes = false;
  };

  int stream = 0;
  std::vector<std::function<void()>> operations;
  size_t told = 0;  // operations whose uses are known
  std::map<const void*, Used> used;
  std::map<const void*, std::vector<char>> kept;  // the bytes of memory from before
  std::map<const void*, size_t> own;              // its bytes
  std::vector<void*> freed;                       // of its own memory
};

std::mutex mutex;
std::map<int64_t, std::unique_ptr<Graph>>& Graphs() {
  static auto& graphs = *new std::map<int64_t, std::unique_ptr<Graph>>;
  return graphs;
}
std::map<const void*, Graph*>& Owners() {  // of memory
  static auto& owners = *new std::map<const void*, Graph*>;
  return owners;
}
std::atomic<int> captured_streams[kStreams] = {};

thread_local Graph* captured = nullptr;

[[noreturn]] void End(const char* what) {
  std::fprintf(stderr, "simulated GPU: %s\n", what);
  std::abort();
}

void FillOwn(const Graph& graph) {
  for (const auto& [address, bytes] : graph.own) std::memset(OnHost(address), kUnwritten, bytes);
}

Graph& Find(int64_t number) {
  const std::lock_guard lock(mutex);
  const auto found = Graphs().find(number);
  if (found == Graphs().end()) End("there is no such graph");
  return *found->second;
}

int64_t Begin(int64_t device) {
  const int stream = CurrentStream(static_cast<c10::DeviceIndex>(device));
  if (stream % kStreamsOfDevice == 0) End("a default stream cannot be captured");
  RefuseInCapture("a second capture");
  const std::lock_guard lock(mutex);
  static int64_t next = 0;
  captured = Graphs().emplace(++next, std::make_unique<Graph>()).first->second.get();
  captured->stream = stream;
  ++captured_streams[stream];
  return next;
}

void EndCapture(int64_t number) {
  Graph& graph = Find(number);
  if (captured != &graph) End("the thread does not capture this graph");
  if (graph.told != graph.operations.size()) End("the simulation cannot capture an operation");
  captured = nullptr;
  --captured_streams[graph.stream];
  for (const auto& [address, bytes] : graph.kept) {
    std::memcpy(OnHost(address), bytes.data(), bytes.size());
  }
  graph.kept.clear();
  FillOwn(graph);
}

void Replay(int64_t number) {
  RefuseInCapture("a replay");
  ++TheCounts().replays;
  const Graph& graph = Find(number);
  std::vector<Use> uses;
  for (const auto& [address, used] : graph.used) {
    if (GenerationOf(address) != used.generation) {
      End("a graph uses memory that was freed after its capture");
    }
    uses.push_back({address, used.writes});
  }
  for (const auto& [address, _] : graph.own) uses.push_back({address, /*writes=*/true});
  Enqueue(CurrentStream(static_cast<c10::DeviceIndex>(graph.stream / kStreamsOfDevice)), uses);
  FillOwn(graph);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::DisableRecordFunctionGuard unseen;
  for (const auto& operation : graph.operations) operation();
}

void Free(int64_t number) {
  std::vector<void*> freed;
  {
    const std::lock_guard lock(mutex);
    const auto found = Graphs().find(number);
    if (found == Graphs().end()) End("a graph ends twice");
    Graph& graph = *found->second;
    if (captured == &graph) {
      captured = nullptr;
      --captured_streams[graph.stream];
    }
    freed = std::move(graph.freed);
    for (const auto& [address, _] : graph.own) Owners().erase(address);
    Graphs().erase(found);
  }
  for (void* const address : freed) DeviceMemory().raw_deleter()(address);
}

TORCH_LIBRARY(tandem_graph, library) {
  library.def("begin(int device) -> int", &Begin);
  library.def("end(int graph) -> ()", &EndCapture);
  library.def("replay(int graph) -> ()", &Replay);
  library.def("free(int graph) -> ()", &Free);
}

}  // namespace

const void* CapturedGraph() { return captured; }

void RefuseInCapture(const char* what) {
  if (captured == nullptr) return;
  std::fprintf(stderr, "simulated GPU: %s cannot be captured\n", what);
  std::abort();
}

void KeepForCapture(const void* address) {
  if (captured == nullptr || address == nullptr) return;
  const auto [begin, bytes] = AllocationOf(address);
  if (captured->own.contains(begin)) return;
  const auto* const data = static_cast<const char*>(OnHost(begin));
  captured->kept.try_emplace(begin, data, data + bytes);
}

void Record(std::function<void()> operation) {
  if (captured != nullptr) captured->operations.push_back(std::move(operation));
}

void UseInCapture(int stream, const std::vector<Use>& uses) {
  if (captured == nullptr) {
    if (captured_streams[stream] > 0) End("another thread captures the stream of an operation");
    return;
  }
  if (stream != captured->stream) End("an operation on another stream than the captured one");
  if (captured->told != captured->operations.size()) {
    End("the simulation cannot capture an operation");
  }
  ++captured->told;
  for (const Use& use : uses) {
    if (use.address == nullptr) continue;
    const void* const begin = AllocationOf(use.address).first;
    if (captured->own.contains(begin)) continue;
    Graph::Used& used = captured->used[begin];
    used.generation = GenerationOf(begin);
    used.writes |= use.writes;
  }
}

void AllocatedInCapture(const void* address) {
  if (captured == nullptr) return;
  const std::lock_guard lock(mutex);
  captured->own[address] = AllocationOf(address).second;
  Owners()[address] = captured;
}

bool IsKeptByGraph(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = Owners().find(address);
  if (found == Owners().end()) return false;
  found->second->freed.push_back(address);
  return true;
}

}  // namespace tandem::simulated_gpu
