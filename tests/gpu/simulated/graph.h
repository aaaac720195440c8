// Graphs of the simulated GPUs, as CUDA's: a thread captures the operations of a stream, and a
// graph repeats them, on the same memory. The operators tandem_graph::begin, end, replay and free
// are the interface of programs (common/tensor/aten/device_graph.h).
//
//   A captured operation is recorded and leaves no trace: what it wrote to memory from before is
//   as it was, and memory that the graph allocated has nothing but kUnwritten, before each replay,
//   too.
//   A replay knows only the recorded operations: addresses, shapes, types and numbers of their
//   operands, never a tensor of the program.
//   Memory that a captured operation allocates is the graph's until that ends.
//
// The process ends where a real capture fails or a replay has no meaning:
//
//   a capture of a default stream, or of two streams; an operation of another thread on the stream
//   a wait of the host, a copy between host and device, a number that the host reads
//   a wait for an event from outside of the capture, or outside for one from within
//   a replay that uses memory that was freed since, or belongs to somebody else
#ifndef TANDEM_TESTS_GPU_SIMULATED_GRAPH_H_
#define TANDEM_TESTS_GPU_SIMULATED_GRAPH_H_

#include <functional>

#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {

// The graph that the calling thread captures; nullptr: none. An opaque name.
const void* CapturedGraph();
inline bool IsCapturing() { return CapturedGraph() != nullptr; }
// Ends the process, if the calling thread captures.
void RefuseInCapture(const char* what);

// Keeps the bytes of memory that an operation is about to write, if it is captured.
void KeepForCapture(const void* address);
// Adds an operation to the captured graph, of which the thread has told its uses (Enqueue).
void Record(std::function<void()> operation);

// Reports of stream.cc and memory.cc: on a thread that captures, the uses of an operation and the
// memory that it allocated; on any thread, memory that is freed, which a graph may still have.
void UseInCapture(int stream, const std::vector<Use>& uses);
void AllocatedInCapture(const void* address);
bool IsKeptByGraph(void* address);

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_GRAPH_H_
