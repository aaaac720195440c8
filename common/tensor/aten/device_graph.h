// Graphs of a GPU: operations of a stream that are captured once, and then repeated with one call
// of the host, on the same memory.
//
//   std::unique_ptr<DeviceGraph> graph = DeviceGraph::Make(device);
//   graph->Begin();
//   const at::Tensor y = at::relu(x);  // captured, and not computed
//   graph->End();
//   x.copy_(values);
//   graph->Replay();  // y has the values' relu
#ifndef TANDEM_COMMON_TENSOR_ATEN_DEVICE_GRAPH_H_
#define TANDEM_COMMON_TENSOR_ATEN_DEVICE_GRAPH_H_

#include <c10/core/Device.h>

#include <memory>

namespace tandem {

class DeviceGraph {
 public:
  // Returns a graph of nothing; nullptr if the device, or the build, has no graphs. The graph may
  // use the memory of `other`, which has ended its capture, and which it outlives at most together
  // with all that share it; then a replay of one overwrites results of the other.
  static std::unique_ptr<DeviceGraph> Make(c10::Device device, DeviceGraph* other = nullptr);

  // Ends a capture that goes on, and gives the memory of captured tensors back.
  virtual ~DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // Captures what the calling thread does on the current stream of the device, which is not its
  // default one, until End. All operations have run on it before, so that libraries have their
  // memory. None of them may let the host wait, or copy between host and device.
  virtual void Begin() = 0;
  virtual void End() = 0;
  // Repeats the captured operations on the current stream. Memory that they use must still be
  // there, and has what it has now; tensors that they made have new values afterwards.
  virtual void Replay() = 0;

 protected:
  DeviceGraph() = default;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_DEVICE_GRAPH_H_
