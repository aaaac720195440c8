// Counts every allocation of the tensor library: none may grow beyond the budget.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "common/loss/linear_cross_entropy.h"
#include "common/loss/supervised_loss.h"

namespace tandem::loss {
namespace {

// The default allocator, with a meter.
class MeteredAllocator : public c10::Allocator {
 public:
  explicit MeteredAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), bytes, this};
    live_ += static_cast<int64_t>(bytes);
    peak_ = std::max<int64_t>(peak_, live_);
    void* data = block->data.get();
    return {data, block, &Delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void Restart() { peak_ = live_.load(); }
  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
    MeteredAllocator* owner;
  };
  static void Delete(void* context) {
    auto* block = static_cast<Block*>(context);
    block->owner->live_ -= static_cast<int64_t>(block->bytes);
    delete block;
  }
  c10::Allocator* inner_;
  std::atomic<int64_t> live_{0};
  int64_t peak_ = 0;
};

TEST(FusedOutputLossMemoryTest, PeakStaysWithinTheBudget) {
  constexpr int64_t kRows = 300, kHidden = 16, kVocabulary = 10000, kBudget = 1 << 20;
  // Never destroyed: tensors may outlive the test.
  static auto* const meter = new MeteredAllocator(c10::GetCPUAllocator());
  c10::Allocator* const before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(meter, /*priority=*/1);
  {
    at::manual_seed(1);
    const at::Tensor hidden = at::randn({kRows, kHidden}),
                     weight = at::randn({kVocabulary, kHidden});
    OutputRows rows;
    for (int64_t row = 0; row < kRows; ++row) {
      rows.positions.push_back(row);
      rows.labels.push_back(row % kVocabulary);
    }
    OutputGradients gradients = {
        .hidden = at::zeros_like(hidden), .weight = at::zeros_like(weight), .bias = {}};
    const std::vector<double> scales(kRows, 1.0 / kRows);
    for (const LossImpl impl : {LossImpl::kCce, LossImpl::kTorchCompile, LossImpl::kPytorch}) {
      for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
        SCOPED_TRACE(testing::Message() << LossImplName(impl) << " " << static_cast<int>(mode));
        auto loss = LinearCrossEntropyLoss::Create(weight, {},
                                                   {.impl = impl, .logits_chunk_bytes = kBudget})
                        .value();
        const int64_t start = meter->live();
        meter->Restart();
        for (int step = 0; step < 2; ++step) {
          SupervisedLossEvaluator evaluator(scales);
          ASSERT_TRUE(loss->ForwardBackward(
                              hidden, rows,
                              [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
                              gradients, mode)
                          .ok());
        }
        // Beside the logits there are only buffers of rows times H, and of some numbers per row.
        const bool keep = mode == LossMode::kGradientInForward;
        const int64_t budget = keep ? kBudget : kBudget / 4;
        const int64_t small = (keep ? loss->chunk_rows() : kRows) * (2 * kHidden + 128) * 8;
        EXPECT_LE(meter->peak() - start, budget + small);
        EXPECT_GT(meter->peak() - start, budget / 2);
        EXPECT_LT(budget + small, kRows * kVocabulary * 4 / 4);  // far below the whole logits
      }
    }
  }
  c10::SetCPUAllocator(before, /*priority=*/1);
}

}  // namespace
}  // namespace tandem::loss
