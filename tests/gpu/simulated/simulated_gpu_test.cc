#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::simulated_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0);

at::Tensor Pinned(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options().pinned_memory(true)).copy_(x);
}

void Wait() {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  guard.synchronizeStream(guard.getStream(kGpu));
}

int64_t Synchronizations(const std::function<void()>& fn) {
  const int64_t before = TheCounts().synchronizations;
  fn();
  return TheCounts().synchronizations - before;
}

TEST(SimulatedGpuTest, ComputesAsTheCpu) {
  at::manual_seed(1);
  const at::Tensor a = at::randn({5, 7}), b = at::randn({7, 3});
  const at::Tensor on_gpu = at::softmax(a.to(kGpu).matmul(b.to(kGpu)), -1);
  EXPECT_EQ(on_gpu.device(), kGpu);
  EXPECT_TRUE(at::equal(on_gpu.cpu(), at::softmax(a.matmul(b), -1)));
}

TEST(SimulatedGpuTest, ViewsShareMemory) {
  const at::Tensor x = at::zeros({4, 6}, kGpu);
  x.narrow(1, 2, 3).fill_(1);
  x.t().select(0, 0).add_(at::ones({4}, kGpu));
  x.view({2, 12}).slice(0, 1).mul_(2);
  const at::Tensor part = x.cpu();
  EXPECT_EQ(part.sum().item<float>(), 4 + 12 + (2 + 6));
  EXPECT_EQ(x.split(2)[1].storage().data(), x.storage().data());
}

TEST(SimulatedGpuTest, GradientsFlow) {
  const at::Tensor x = at::arange(6.0, kGpu).requires_grad_();
  (x * x).sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), 2 * at::arange(6.0)));
}

TEST(SimulatedGpuTest, ResultsGrow) {
  at::Tensor out = at::empty({0}, kGpu);
  at::arange_out(out, 0, 5, 1);
  EXPECT_TRUE(at::equal(out.cpu(), at::arange(0, 5).to(at::kFloat)));
}

TEST(SimulatedGpuTest, MemoryThatNobodyWroteIsNoNumber) {
  EXPECT_TRUE(at::empty({100}, kGpu).isnan().all().item<bool>());
  EXPECT_EQ(at::empty({3}, at::dtype(at::kLong).device(kGpu)).max().item<int64_t>(), -1);
}

TEST(SimulatedGpuTest, MemoryComesBackAndRunsOut) {
  const auto free = [] { return DeviceMemory().getMemoryInfo(0).first; };
  const size_t before = free();
  {
    const at::Tensor x = at::empty({1000}, kGpu), y = at::empty({2000}, kGpu);
    EXPECT_EQ(before - free(), 4096 + 8192);
  }
  EXPECT_EQ(free(), before);
  EXPECT_THROW(
      at::empty({static_cast<int64_t>(kMemoryBytes) + 1}, at::dtype(at::kByte).device(kGpu)),
      c10::OutOfMemoryError);
}

TEST(SimulatedGpuTest, TensorsOfTheCpuAreNoOperands) {
  const at::Tensor x = at::ones({3}, kGpu);
  EXPECT_THROW(x.add(at::ones({3})), c10::Error);
  EXPECT_THROW(x.add(at::ones({3}, at::Device(at::kCUDA, 1))), c10::Error);
  EXPECT_EQ(x.add(1).sum().item<float>(), 6);
}

TEST(SimulatedGpuTest, ACopyToTheHostIsLate) {
  const at::Tensor x = at::full({3}, 4.0, kGpu);
  const at::Tensor host = at::zeros({3}, at::TensorOptions().pinned_memory(true));
  host.copy_(x, /*non_blocking=*/true);
  x.fill_(5);  // runs behind the copy
  EXPECT_TRUE(host.isnan().all().item<bool>());
  Wait();
  EXPECT_TRUE(at::equal(host, at::full({3}, 4.0)));
}

TEST(SimulatedGpuTest, AnEventWaitsForWhatIsBeforeIt) {
  const at::Tensor x = at::ones({3}, kGpu);
  const at::Tensor first = Pinned(at::zeros({3})), second = Pinned(at::zeros({3}));
  first.copy_(x, /*non_blocking=*/true);
  c10::Event event(at::kCUDA);
  event.record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(kGpu));
  second.copy_(x, /*non_blocking=*/true);
  EXPECT_FALSE(event.query());
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(at::equal(first, at::ones({3})));
  EXPECT_TRUE(second.isnan().all().item<bool>());
  Wait();
  EXPECT_TRUE(at::equal(second, at::ones({3})));
}

TEST(SimulatedGpuTest, SynchronizationsAreCounted) {
  const at::Tensor x = at::ones({3}, kGpu);
  const at::Tensor host = at::zeros({3}), pinned = Pinned(host), other = Pinned(host);
  EXPECT_EQ(Synchronizations([&] { x.mul(2).add_(x); }), 0);
  EXPECT_EQ(Synchronizations([&] { pinned.to(kGpu, /*non_blocking=*/true); }), 0);
  EXPECT_EQ(Synchronizations([&] { other.copy_(x, /*non_blocking=*/true); }), 0);
  EXPECT_EQ(Synchronizations([&] { host.to(kGpu); }), 1);
  EXPECT_EQ(Synchronizations([&] { x.cpu(); }), 1);
  EXPECT_EQ(Synchronizations([&] { x.sum().item(); }), 1);
  EXPECT_EQ(Synchronizations([&] { x.nonzero(); }), 1);
  EXPECT_EQ(Synchronizations([&] { at::equal(x, x); }), 1);
}

TEST(SimulatedGpuTest, ViewsAreNoLaunches) {
  const at::Tensor x = at::ones({3, 4}, kGpu);
  const int64_t before = TheCounts().launches;
  x.t().narrow(0, 1, 2).unsqueeze(0).expand({2, 2, 3});
  EXPECT_EQ(TheCounts().launches, before);
  x.t().add(1);
  EXPECT_EQ(TheCounts().launches, before + 1);
}

// Another stream than the default one, on which operations run while it lives.
class OnStream {
 public:
  OnStream() : stream_(Guard().getStreamFromGlobalPool(kGpu)), guard_(stream_) {}
  const c10::Stream& stream() const { return stream_; }

  static const c10::impl::VirtualGuardImpl& Guard() {
    static const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    return guard;
  }

 private:
  const c10::Stream stream_;
  const c10::StreamGuard guard_;
};

c10::Stream DefaultStream() { return OnStream::Guard().getDefaultStream(kGpu); }

TEST(SimulatedStreamsTest, AnEventOrdersStreams) {
  const at::Tensor x = at::ones({3}, kGpu);
  c10::Event written(at::kCUDA), read(at::kCUDA);
  written.record(DefaultStream());
  {
    const OnStream on;
    written.block(on.stream());
    x.add_(1);
    read.record(on.stream());
  }
  EXPECT_EQ(OnStream::Guard().getStream(kGpu), DefaultStream());
  read.block(DefaultStream());
  EXPECT_TRUE(at::equal(x.mul(2).cpu(), at::full({3}, 4.0)));
}

TEST(SimulatedStreamsTest, WhatTheHostWaitedForIsInOrder) {
  const at::Tensor x = at::ones({3}, kGpu);
  Wait();
  const OnStream on;
  EXPECT_EQ(x.sum().item<float>(), 3);
}

// A wait for one stream delivers no copy of another one.
TEST(SimulatedStreamsTest, StreamsAreLateByThemselves) {
  const at::Tensor x = at::ones({3}, kGpu), host = Pinned(at::zeros({3}));
  Wait();
  const OnStream on;
  host.copy_(x, /*non_blocking=*/true);
  Wait();
  EXPECT_TRUE(at::equal(host, at::ones({3})));
  host.copy_(x.add(1), /*non_blocking=*/true);
  OnStream::Guard().synchronizeStream(DefaultStream());
  EXPECT_TRUE(host.isnan().all().item<bool>());
  Wait();
  EXPECT_TRUE(at::equal(host, at::full({3}, 2.0)));
}

TEST(SimulatedStreamsTest, StreamsReadTheSameMemory) {
  const at::Tensor x = at::ones({3}, kGpu);
  Wait();
  const at::Tensor sum = x.sum();
  const OnStream on;
  EXPECT_EQ(x.sum().item<float>(), 3);
}

// Rows and columns of a matrix.
TEST(SimulatedStreamsTest, StreamsUseDifferentBytesOfOneAllocation) {
  const at::Tensor x = at::ones({4, 6}, kGpu);
  Wait();
  x.narrow(0, 0, 2).narrow(1, 0, 3).zero_();
  const OnStream on;
  x.narrow(0, 2, 2).zero_();
  EXPECT_EQ(x.narrow(1, 3, 3).sum().item<float>(), 6);
}

using SimulatedGpuDeathTest = testing::Test;

TEST(SimulatedGpuDeathTest, TheHostCannotReadMemoryOfTheDevice) {
  const at::Tensor x = at::ones({3}, kGpu);
  const float* const data = x.const_data_ptr<float>();
  EXPECT_DEATH(static_cast<void>(*const_cast<const volatile float*>(data)), "");
}

TEST(SimulatedGpuDeathTest, TheHostMustNotWriteWhatACopyReads) {
  const auto write_too_early = [] {
    const at::Tensor pinned = Pinned(at::ones({3}));
    const at::Tensor x = pinned.to(kGpu, /*non_blocking=*/true);
    pinned.fill_(2);
    Wait();
  };
  EXPECT_DEATH(write_too_early(), "still reads");
}

TEST(SimulatedStreamsDeathTest, AReadMustWaitForAWrite) {
  const auto read_too_early = [] {
    const at::Tensor x = at::ones({3}, kGpu);
    const OnStream on;
    x.sum();
  };
  EXPECT_DEATH(read_too_early(), "reads memory, which stream 0 may still use");
}

TEST(SimulatedStreamsDeathTest, AWriteMustWaitForAReadAndAWrite) {
  const auto write_too_early = [](bool writes) {
    const at::Tensor x = at::ones({3}, kGpu);
    Wait();
    if (writes) {
      x.zero_();
    } else {
      x.sum();
    }
    const OnStream on;
    x.fill_(2);
  };
  EXPECT_DEATH(write_too_early(true), "writes to memory");
  EXPECT_DEATH(write_too_early(false), "writes to memory");
}

TEST(SimulatedStreamsDeathTest, StreamsMeetInOneColumn) {
  const auto meet = [] {
    const at::Tensor x = at::ones({4, 6}, kGpu);
    Wait();
    x.narrow(1, 0, 3).zero_();
    const OnStream on;
    x.narrow(1, 3, 3).sum();
    x.narrow(1, 2, 3).sum();
  };
  EXPECT_DEATH(meet(), "reads memory");
}

// An event that was recorded before the work orders nothing.
TEST(SimulatedStreamsDeathTest, AnEventMustBeRecordedBehindTheWork) {
  const auto record_too_early = [] {
    const at::Tensor x = at::ones({3}, kGpu);
    Wait();
    c10::Event event(at::kCUDA);
    event.record(DefaultStream());
    x.zero_();
    const OnStream on;
    event.block(on.stream());
    x.sum();
  };
  EXPECT_DEATH(record_too_early(), "reads memory");
}

// The allocator would give it to later work of the stream for which it was allocated.
TEST(SimulatedStreamsDeathTest, MemoryComesBackWhenOtherStreamsAreDone) {
  const auto use = [](bool records) {
    at::Tensor x = at::ones({3}, kGpu);
    Wait();
    const OnStream on;
    x.sum();
    if (records) x.record_stream(on.stream());
    x.reset();
    std::exit(0);
  };
  EXPECT_DEATH(use(false), "gets memory back");
  EXPECT_EXIT(use(true), testing::ExitedWithCode(0), "");
}

// A process group's stream, for which the host waits because it sends with Gloo.
TEST(SimulatedStreamsDeathTest, AWaitOfTheHostForAGroupOrdersNothing) {
  const auto write = [](bool waits) {
    const at::Tensor x = at::ones({3}, kGpu);
    Wait();
    const c10::Stream group =
        OnStream::Guard().getStreamFromGlobalPool(kGpu, /*isHighPriority=*/true);
    {
      const c10::StreamGuard on(group);
      const int64_t before = TheCounts().synchronizations;
      EXPECT_TRUE(at::equal(x.cpu(), at::ones({3})));
      EXPECT_EQ(TheCounts().synchronizations, before);
    }
    c10::Event event(at::kCUDA);
    event.record(group);
    if (waits) event.block(DefaultStream());
    x.zero_();
    std::exit(testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_DEATH(write(false), "writes to memory");
  EXPECT_EXIT(write(true), testing::ExitedWithCode(0), "");
}

TEST(SimulatedStreamsTest, OperationsOfGroupsThatHaveOthersBesideThemAreCounted) {
  const at::Tensor x = at::ones({3}, kGpu), y = at::ones({3}, kGpu);
  const auto counts = [&](bool computes) {
    const int64_t all = TheCounts().of_groups, beside = TheCounts().of_groups_beside;
    c10::Event begin(at::kCUDA), end(at::kCUDA);
    const c10::Stream group =
        OnStream::Guard().getStreamFromGlobalPool(kGpu, /*isHighPriority=*/true);
    begin.record(DefaultStream());
    begin.block(group);
    if (computes) y.add_(1);
    {
      const c10::StreamGuard on(group);
      x.add_(1);
    }
    end.record(group);
    end.block(DefaultStream());
    return std::pair(TheCounts().of_groups - all, TheCounts().of_groups_beside - beside);
  };
  EXPECT_EQ(counts(true), std::pair(int64_t{1}, int64_t{1}));
  EXPECT_EQ(counts(false), std::pair(int64_t{1}, int64_t{0}));
}

}  // namespace
}  // namespace tandem::simulated_gpu
