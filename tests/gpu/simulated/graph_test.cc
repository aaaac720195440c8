// The faults that the simulation of graphs finds.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "common/tensor/aten/device_graph.h"
#include "tests/gpu/simulated/counts.h"

namespace tandem {
namespace {

const at::Device kGpu(at::kCUDA, 0);

c10::Stream NewStream() {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(kGpu);
}

// A stream, which waits for what the default one had to do, and a graph on it.
class SimulatedGraphTest : public testing::Test {
 protected:
  SimulatedGraphTest() {
    c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(kGpu.index());
    on_stream_ = std::make_unique<c10::StreamGuard>(NewStream());
  }

  template <typename Function>
  void Capture(const Function& fn) {
    graph_->Begin();
    fn();
    graph_->End();
  }

  static at::Tensor OnHost(const at::Tensor& x) { return x.cpu(); }

  std::unique_ptr<c10::StreamGuard> on_stream_;
  std::unique_ptr<DeviceGraph> graph_ = DeviceGraph::Make(kGpu);
};

using SimulatedGraphDeathTest = SimulatedGraphTest;

TEST_F(SimulatedGraphTest, AReplayComputesWithWhatTheMemoryHasThen) {
  const at::Tensor x = at::ones({3}, kGpu), sum = at::zeros({3}, kGpu);
  at::Tensor y;
  Capture([&] {
    y = x.mul(2).narrow(0, 1, 2).add(x.to(at::kDouble).narrow(0, 0, 2));
    sum.add_(x);
  });
  EXPECT_TRUE(OnHost(sum).equal(at::zeros({3}))) << "a capture computes nothing";
  EXPECT_TRUE(OnHost(y).isnan().all().item<bool>());
  for (const double value : {5.0, -1.0}) {
    x.fill_(value);
    graph_->Replay();
    EXPECT_TRUE(OnHost(y).equal(at::full({2}, 3 * value, at::kDouble)));
  }
  EXPECT_TRUE(OnHost(sum).equal(at::full({3}, 4.0f)));
}

// A number of the host is that of the capture.
TEST_F(SimulatedGraphTest, NumbersOfTheHostAreThoseOfTheCapture) {
  const at::Tensor x = at::ones({2}, kGpu), factor = at::full({}, 3.0f);
  at::Tensor y;
  Capture([&] { y = x * factor; });
  factor.fill_(7);
  graph_->Replay();
  EXPECT_TRUE(OnHost(y).equal(at::full({2}, 3.0f)));
}

TEST_F(SimulatedGraphTest, ItsMemoryIsItsOwnUntilItEnds) {
  const at::Tensor x = at::ones({1000}, kGpu);
  at::Tensor y;
  Capture([&] { y = x.add(1).mul(2); });
  const void* const address = y.const_data_ptr();
  y.reset();
  EXPECT_NE(at::empty({1000}, kGpu).const_data_ptr(), address);
  graph_->Replay();
  graph_.reset();
  bool comes_back = false;
  std::vector<at::Tensor> others;
  for (int i = 0; i < 3; ++i) {
    others.push_back(at::empty({1000}, kGpu));
    comes_back |= others.back().const_data_ptr() == address;
  }
  EXPECT_TRUE(comes_back);
}

TEST_F(SimulatedGraphTest, AReplayIsOneOfTheCountsAndNoLaunch) {
  const at::Tensor x = at::ones({3}, kGpu);
  at::Tensor y;
  Capture([&] { y = x.add(1).mul(2); });
  const int64_t launches = simulated_gpu::TheCounts().launches;
  const int64_t replays = simulated_gpu::TheCounts().replays;
  const int64_t allocations = simulated_gpu::TheCounts().allocations;
  graph_->Replay();
  EXPECT_EQ(simulated_gpu::TheCounts().launches, launches);
  EXPECT_EQ(simulated_gpu::TheCounts().replays, replays + 1);
  EXPECT_EQ(simulated_gpu::TheCounts().allocations, allocations);
}

TEST_F(SimulatedGraphDeathTest, ACaptureMustNotWaitOrCopyToTheHost) {
  const at::Tensor x = at::ones({3}, kGpu);
  EXPECT_DEATH(Capture([&] { x.sum().item<float>(); }), "wait of the host cannot be captured");
  EXPECT_DEATH(Capture([&] { x.nonzero(); }), "wait of the host cannot be captured");
  EXPECT_DEATH(Capture([&] { x.cpu(); }), "between host and device cannot be captured");
  EXPECT_DEATH(Capture([&] { x.copy_(at::ones({3})); }), "between host and device");
}

TEST_F(SimulatedGraphDeathTest, ACaptureIsOfOneStreamThatIsNoDefaultOne) {
  const at::Tensor x = at::ones({3}, kGpu);
  EXPECT_DEATH(Capture([&] {
                 const c10::StreamGuard other(NewStream());
                 x.add(1);
               }),
               "another stream than the captured one");
  on_stream_.reset();
  EXPECT_DEATH(graph_->Begin(), "a default stream cannot be captured");
}

TEST_F(SimulatedGraphDeathTest, EventsDoNotLeadIntoACaptureOrOutOfIt) {
  c10::Event event(at::kCUDA), within(at::kCUDA);
  event.record(on_stream_->current_stream());
  EXPECT_DEATH(Capture([&] { event.block(on_stream_->current_stream()); }), "event of a capture");
  EXPECT_DEATH(
      {
        Capture([&] { within.record(on_stream_->current_stream()); });
        within.block(NewStream());
      },
      "event of a capture");
}

// Freed, or freed and in the hands of another tensor.
TEST_F(SimulatedGraphDeathTest, MemoryFromBeforeMustStay) {
  for (const bool is_taken : {false, true}) {
    EXPECT_DEATH(
        {
          at::Tensor x = at::ones({3}, kGpu);
          at::Tensor y;
          Capture([&] { y = x.add(1); });
          x.reset();
          at::Tensor other;
          if (is_taken) other = at::ones({3}, kGpu);
          graph_->Replay();
        },
        "freed after its capture");
  }
}

TEST_F(SimulatedGraphDeathTest, AGraphThatEndedIsNotReplayed) {
  EXPECT_DEATH(graph_->Replay(), "there is no such graph");
}

}  // namespace
}  // namespace tandem
