#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "common/kernels/attention_window.h"
#include "common/kernels/cuda/testing/device_arrays.h"
#include "common/kernels/device_kernels.h"
#include "common/kernels/paged_plan.h"

namespace tandem::kernels {
namespace {

using CudaAttentionTest = CudaKernelsTest;

struct Shape {
  int64_t heads, kv_heads, head_dim;
  int64_t window = kNoWindow;
  float scale = 0.3f, soft_cap = 0;
  bool bfloat16 = false, cache_bfloat16 = false;

  int64_t group() const { return heads / kv_heads; }
};

// A sequence with `start` positions in the cache and as many new rows as the pass says.
struct Sequence {
  int64_t start, rows;
  uint32_t seed = 0;               // of its queries, keys and values
  bool ends_in_no_number = false;  // its last value

  int64_t length() const { return start + rows; }
};

std::vector<float> Normal(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// The tensors of a pass. Blocks of the cache are in a random order, and hold no number where
// nothing was written.
class Pass {
 public:
  Pass(const Shape& shape, const std::vector<Sequence>& sequences)
      : shape_(shape), sequences_(sequences) {
    const int64_t width = shape.kv_heads * shape.head_dim, q_width = shape.heads * shape.head_dim;
    offsets_ = {0};
    int64_t blocks = 0;
    for (const Sequence& s : sequences) {
      offsets_.push_back(offsets_.back() + s.rows);
      starts_.push_back(s.start);
      const int64_t count = (s.length() + kPagedBlockTokens - 1) / kPagedBlockTokens;
      blocks += count;
      table_width_ = std::max(table_width_, count);
    }
    std::vector<int32_t> order(blocks);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    table_.assign(sequences.size() * table_width_, 0);
    std::vector<float> keys(blocks * kPagedBlockTokens * width,
                            std::numeric_limits<float>::quiet_NaN());
    std::vector<float> values = keys;
    for (size_t s = 0, next = 0; s < sequences.size(); ++s) {
      const Sequence& sequence = sequences[s];
      const auto k = Normal(sequence.length() * width, 3 * sequence.seed);
      auto v = Normal(sequence.length() * width, 3 * sequence.seed + 1);
      if (sequence.ends_in_no_number) v.back() = std::numeric_limits<float>::quiet_NaN();
      const auto q = Normal(sequence.length() * q_width, 3 * sequence.seed + 2);
      for (int64_t p = 0; p < sequence.length(); ++p) {
        int32_t& block = table_[s * table_width_ + p / kPagedBlockTokens];
        if (p % kPagedBlockTokens == 0) block = order[next++];
        if (p >= sequence.start) {
          const auto append = [p](std::vector<float>& to, const std::vector<float>& x, int64_t n) {
            to.insert(to.end(), x.begin() + p * n, x.begin() + (p + 1) * n);
          };
          append(new_keys_, k, width);
          append(new_values_, v, width);
          append(queries_, q, q_width);
          blocks_.push_back(block);
          places_.push_back(p % kPagedBlockTokens);
          continue;
        }
        for (int64_t i = 0; i < width; ++i) {
          const int64_t at = Place(s, p, i / shape.head_dim) + i % shape.head_dim;
          keys[at] = k[p * width + i];
          values[at] = v[p * width + i];
        }
      }
    }
    key_cache_.emplace(keys, shape.cache_bfloat16);
    value_cache_.emplace(values, shape.cache_bfloat16);
    d_queries_.emplace(queries_, shape.bfloat16);
    const Numbers d_keys(new_keys_, shape.bfloat16), d_values(new_values_, shape.bfloat16);
    const DeviceArray<int64_t> d_blocks(blocks_), d_places(places_);
    EXPECT_STREQ(kCudaKernels.cache_write({.keys = d_keys.get(),
                                           .key_row_stride = width,
                                           .values = d_values.get(),
                                           .value_row_stride = width,
                                           .blocks = d_blocks.get(),
                                           .places = d_places.get(),
                                           .key_cache = key_cache_->get(),
                                           .value_cache = value_cache_->get(),
                                           .rows = offsets_.back(),
                                           .kv_heads = shape.kv_heads,
                                           .head_dim = shape.head_dim,
                                           .bfloat16 = shape.bfloat16,
                                           .cache_bfloat16 = shape.cache_bfloat16},
                                          nullptr),
                 nullptr);
    for (int64_t i = 0; i < std::ssize(new_keys_); ++i) {
      new_keys_[i] = static_cast<float>(d_keys[i]);
      new_values_[i] = static_cast<float>(d_values[i]);
    }
  }

  // Returns [T, heads, D]. With `spare`, that many items and rows more are announced than there
  // are, and the device gets the counts.
  std::vector<float> Attend(int64_t max_partials = 1000, int64_t spare = 0) const {
    const PagedPlan plan = PlanPagedAttention(offsets_, starts_,
                                              {.group = shape_.group(),
                                               .window = shape_.window,
                                               .max_partials = max_partials,
                                               .max_rows = 1000});
    const int64_t rows_per_item = PagedRowsPerItem(shape_.group());
    const int64_t partials = plan.partials * rows_per_item * shape_.heads;
    const DeviceArray<int32_t> table(table_);
    const DeviceArray<DevicePagedItem> items(plan.items);
    const DeviceArray<DevicePartialRow> partial_rows(plan.partial_rows);
    const DeviceArray<int32_t> counts(
        {static_cast<int32_t>(plan.items.size()), static_cast<int32_t>(plan.partial_rows.size())});
    const std::vector<float> no_number(1, std::numeric_limits<float>::quiet_NaN());
    const DeviceFloats highest(std::vector<float>(partials, no_number[0]));
    const DeviceFloats sums(std::vector<float>(partials, no_number[0]));
    const DeviceFloats outputs(
        std::vector<float>(partials * ((shape_.head_dim + 3) / 4 * 4), no_number[0]));
    const Numbers result(std::vector<float>(queries_.size(), no_number[0]), shape_.bfloat16);
    const DevicePagedAttentionArgs args = {
        .queries = d_queries_->get(),
        .row_stride = shape_.heads * shape_.head_dim,
        .key_cache = key_cache_->get(),
        .value_cache = value_cache_->get(),
        .block_table = table.get(),
        .table_width = table_width_,
        .items = items.get(),
        .num_items = std::ssize(plan.items) + spare,
        .partial_rows = partial_rows.get(),
        .num_partial_rows = std::ssize(plan.partial_rows) + spare,
        .counts = spare > 0 ? counts.get() : nullptr,
        .rows_per_item = rows_per_item,
        .highest = highest.get(),
        .sums = sums.get(),
        .partial_outputs = outputs.get(),
        .outputs = result.get(),
        .heads = shape_.heads,
        .kv_heads = shape_.kv_heads,
        .head_dim = shape_.head_dim,
        .window = shape_.window,
        .scale = shape_.scale,
        .soft_cap = shape_.soft_cap,
        .bfloat16 = shape_.bfloat16,
        .cache_bfloat16 = shape_.cache_bfloat16};
    EXPECT_STREQ(kCudaKernels.paged_attention(args, nullptr), nullptr);
    EXPECT_STREQ(kCudaKernels.fold_partials(args, nullptr), nullptr);
    return result.Read();
  }

  // Expects what float64 has for what the cache holds.
  void ExpectMatchesDouble() const {
    const std::vector<float> keys = key_cache_->Read(), values = value_cache_->Read();
    const std::vector<float> actual = Attend();
    const int64_t dim = shape_.head_dim;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      for (int64_t row = offsets_[s]; row < offsets_[s + 1]; ++row) {
        const int64_t position = starts_[s] + row - offsets_[s];
        for (int64_t head = 0; head < shape_.heads; ++head) {
          const int64_t begin = (row * shape_.heads + head) * dim;
          std::vector<double> weights;
          double highest = -std::numeric_limits<double>::infinity(), sum = 0;
          const int64_t first = FirstKey(position, shape_.window);
          for (int64_t p = first; p <= position; ++p) {
            const int64_t key = Place(s, p, head / shape_.group());
            double score = 0;
            for (int64_t d = 0; d < dim; ++d) score += (*d_queries_)[begin + d] * keys[key + d];
            score *= shape_.scale;
            if (shape_.soft_cap > 0) score = shape_.soft_cap * std::tanh(score / shape_.soft_cap);
            weights.push_back(score);
            highest = std::max(highest, score);
          }
          for (double& weight : weights) sum += weight = std::exp(weight - highest);
          for (int64_t d = 0; d < dim; ++d) {
            double expected = 0;
            for (int64_t p = first; p <= position; ++p) {
              expected += weights[p - first] / sum * values[Place(s, p, head / shape_.group()) + d];
            }
            ASSERT_NEAR(actual[begin + d], expected,
                        shape_.bfloat16 ? std::abs(expected) / 250 + 1e-5 : 5e-6)
                << "sequence " << s << ", position " << position << ", head " << head;
          }
        }
      }
    }
  }

  // Expects the keys and values of the new rows, rounded once, in their places.
  void ExpectWritten() const {
    const std::vector<float> keys = key_cache_->Read(), values = value_cache_->Read();
    for (size_t s = 0, i = 0; s < sequences_.size(); ++s) {
      for (int64_t p = starts_[s]; p < sequences_[s].length(); ++p) {
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
          for (int64_t d = 0; d < shape_.head_dim; ++d, ++i) {
            const int64_t at = Place(s, p, head) + d;
            const bool rounds = shape_.cache_bfloat16 && !shape_.bfloat16;
            const double rounding = rounds ? 1.0 / 256 : 0;
            ASSERT_NEAR(keys[at], new_keys_[i], std::abs(new_keys_[i]) * rounding);
            ASSERT_NEAR(values[at], new_values_[i], std::abs(new_values_[i]) * rounding);
          }
        }
      }
    }
  }

 private:
  // Returns the number at which the cache has a head of a position.
  int64_t Place(size_t s, int64_t position, int64_t head) const {
    const int64_t block = table_[s * table_width_ + position / kPagedBlockTokens];
    return ((block * shape_.kv_heads + head) * kPagedBlockTokens + position % kPagedBlockTokens) *
           shape_.head_dim;
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  std::vector<int64_t> offsets_, starts_, blocks_, places_;
  int64_t table_width_ = 0;
  std::vector<int32_t> table_;
  std::vector<float> queries_, new_keys_, new_values_;
  std::optional<Numbers> d_queries_, key_cache_, value_cache_;
};

// One key; one less than a block, a block and one more; full splits; several rows that begin
// within a block and end in the next split.
const std::vector<Sequence> kSequences = {{0, 1, 1},   {62, 1, 2},  {63, 1, 3},
                                          {64, 1, 4},  {127, 1, 5}, {128, 1, 6},
                                          {300, 1, 7}, {0, 5, 8},   {120, 11, 9}};

TEST_F(CudaAttentionTest, MatchesDouble) {
  for (const auto& [bfloat16, cache_bfloat16] :
       {std::pair{false, false}, {false, true}, {true, true}, {true, false}}) {
    for (const auto& [window, soft_cap] : std::vector<std::pair<int64_t, float>>{
             {kNoWindow, 0.0f}, {1, 0.0f}, {70, 2.0f}, {129, 0.0f}}) {
      SCOPED_TRACE(testing::Message() << bfloat16 << cache_bfloat16 << " " << window);
      const Pass pass({.heads = 4,
                       .kv_heads = 2,
                       .head_dim = 16,
                       .window = window,
                       .soft_cap = soft_cap,
                       .bfloat16 = bfloat16,
                       .cache_bfloat16 = cache_bfloat16},
                      kSequences);
      pass.ExpectWritten();
      pass.ExpectMatchesDouble();
    }
  }
}

// Head sizes of the families, and odd ones, with 8 and more query heads for a key/value head.
TEST_F(CudaAttentionTest, MatchesDoubleForEveryShape) {
  bool bfloat16 = false;
  for (const int64_t head_dim : {2, 6, 18, 32, 64, 72, 80, 96, 100, 112, 120, 128, 192, 256}) {
    bfloat16 = !bfloat16;
    SCOPED_TRACE(testing::Message() << head_dim << " " << bfloat16);
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    Pass({.heads = 2,
          .kv_heads = 1,
          .head_dim = head_dim,
          .scale = scale,
          .bfloat16 = bfloat16,
          .cache_bfloat16 = bfloat16},
         {{130, 1, 1}, {61, 5, 2}})
        .ExpectMatchesDouble();
  }
  for (const int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 20}) {
    SCOPED_TRACE(group);
    Pass({.heads = 2 * group, .kv_heads = 2, .head_dim = 8}, {{60, 1, 1}, {126, 4, 2}})
        .ExpectMatchesDouble();
  }
}

// Rows before do not see it.
TEST_F(CudaAttentionTest, AValueThatIsNoNumberStaysInItsRow) {
  const Shape shape = {.heads = 2, .kv_heads = 1, .head_dim = 8};
  const std::vector<float> without = Pass(shape, {{60, 3, 1}}).Attend();
  const std::vector<float> with = Pass(shape, {{60, 4, 1, /*ends_in_no_number=*/true}}).Attend();
  EXPECT_TRUE(std::equal(without.begin(), without.end(), with.begin()));
  EXPECT_TRUE(std::isnan(with.back()));
}

// Alone, in company, from another place of the batch, and however the keys are divided.
TEST_F(CudaAttentionTest, ARowHasItsBitsInAnyPass) {
  for (const auto& shape : {Shape{.heads = 3, .kv_heads = 3, .head_dim = 20},
                            Shape{.heads = 6, .kv_heads = 2, .head_dim = 16, .window = 130},
                            Shape{.heads = 8,
                            .kv_heads = 1,
                            .head_dim = 64,
                            .window = 70,
                            .soft_cap = 2,
                            .bfloat16 = true,
                            .cache_bfloat16 = true}}) {
    // The last rows of a sequence of 270 positions, in one pass and divided into several.
    const Sequence whole = {250, 20, 5};
    const int64_t width = shape.heads * shape.head_dim;
    const std::vector<float> expected = Pass(shape, {whole}).Attend();
    const auto expect_rows = [&](const std::vector<float>& outputs, int64_t row, int64_t first,
                                 int64_t rows) {
      const auto begin = outputs.begin() + row * width;
      EXPECT_TRUE(
          std::equal(begin, begin + rows * width, expected.begin() + (first - whole.start) * width))
          << first;
    };
    expect_rows(Pass(shape, {whole}).Attend(/*max_partials=*/0), 0, 250, 20);
    for (const auto& [first, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{250, 1}, {254, 5}, {256, 1}, {269, 1}}) {
      const Sequence some = {first, rows, 5};
      expect_rows(Pass(shape, {some}).Attend(), 0, first, rows);
      const Pass among(shape, {{200, 3, 1}, some, {0, 2, 2}});
      for (const int64_t partials : {3, 1000}) {
        expect_rows(among.Attend(partials), 3, first, rows);
        expect_rows(among.Attend(partials, /*spare=*/50), 3, first, rows);
      }
    }
  }
}

// More units than the blocks of a launch with counts, which step over them; also none.
TEST_F(CudaAttentionTest, BlocksStepOverTheItemsThatThereAre) {
  const Shape shape = {.heads = 4, .kv_heads = 2, .head_dim = 8};
  std::vector<Sequence> sequences;
  for (uint32_t i = 0; i < 20; ++i) sequences.push_back({i % 2 == 0 ? 300 : 5, 1, i});
  const Pass pass(shape, sequences);
  EXPECT_EQ(pass.Attend(1000, /*spare=*/3), pass.Attend());
  EXPECT_EQ(pass.Attend(0, /*spare=*/1), pass.Attend());
}

TEST_F(CudaAttentionTest, ARowOfNoBlockIsNotWritten) {
  const std::vector<float> values = {1, 2, 3, 4};
  const Numbers rows(values, /*bfloat16=*/false);
  const DeviceArray<int64_t> blocks({-1, 0}), places({0, 5});
  const DeviceFloats keys(std::vector<float>(kPagedBlockTokens * 2, 0));
  const DeviceFloats cached_values(std::vector<float>(kPagedBlockTokens * 2, 0));
  EXPECT_STREQ(kCudaKernels.cache_write({.keys = rows.get(),
                                         .key_row_stride = 2,
                                         .values = rows.get(),
                                         .value_row_stride = 2,
                                         .blocks = blocks.get(),
                                         .places = places.get(),
                                         .key_cache = keys.get(),
                                         .value_cache = cached_values.get(),
                                         .rows = 2,
                                         .kv_heads = 1,
                                         .head_dim = 2,
                                         .bfloat16 = false,
                                         .cache_bfloat16 = false},
                                        nullptr),
               nullptr);
  std::vector<float> expected(kPagedBlockTokens * 2, 0);
  expected[10] = 3;
  expected[11] = 4;
  EXPECT_EQ(keys.Read(), expected);
  EXPECT_EQ(cached_values.Read(), expected);
}

}  // namespace
}  // namespace tandem::kernels
