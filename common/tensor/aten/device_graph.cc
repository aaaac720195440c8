#include "common/tensor/aten/device_graph.h"

#include <cstdint>

#ifdef TANDEM_CUDA
#include <ATen/cuda/CUDAGraph.h>
#else
#include "common/tensor/aten/device_operators.h"
#endif

namespace tandem {
namespace {

#ifdef TANDEM_CUDA

class CudaGraph : public DeviceGraph {
 public:
  explicit CudaGraph(CudaGraph* other) : other_(other) {}
  ~CudaGraph() override {
    if (!captures_) return;
    try {
      graph_.capture_end();
    } catch (const c10::Error&) {  // an operation has broken the capture, and said so
    }
  }

  void Begin() override {
    // Other threads go on with their own streams.
    graph_.capture_begin(other_ == nullptr ? at::cuda::graph_pool_handle() : other_->graph_.pool(),
                         cudaStreamCaptureModeThreadLocal);
    captures_ = true;
  }
  void End() override {
    captures_ = false;
    graph_.capture_end();
  }
  void Replay() override { graph_.replay(); }

 private:
  CudaGraph* const other_;
  at::cuda::CUDAGraph graph_;
  bool captures_ = false;
};

#else

class OperatorGraph : public DeviceGraph {
 public:
  explicit OperatorGraph(c10::Device device) : device_(device) {}
  ~OperatorGraph() override {
    if (graph_ != 0) CallOperator<void>("tandem_graph::free", graph_);
  }

  void Begin() override {
    graph_ = CallOperator<int64_t, int64_t>("tandem_graph::begin", device_.index());
  }
  void End() override { CallOperator<void>("tandem_graph::end", graph_); }
  void Replay() override { CallOperator<void>("tandem_graph::replay", graph_); }

 private:
  const c10::Device device_;
  int64_t graph_ = 0;
};

#endif

}  // namespace

std::unique_ptr<DeviceGraph> DeviceGraph::Make(c10::Device device, DeviceGraph* other) {
  if (!device.is_cuda()) return nullptr;
#ifdef TANDEM_CUDA
  return std::make_unique<CudaGraph>(static_cast<CudaGraph*>(other));
#else
  static_cast<void>(other);
  if (!HasOperator("tandem_graph::begin")) return nullptr;
  return std::make_unique<OperatorGraph>(device);
#endif
}

}  // namespace tandem
