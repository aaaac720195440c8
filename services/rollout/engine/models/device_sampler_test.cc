#include "services/rollout/engine/models/device_sampler.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/coauthoring/tandem_config.h"
#include "common/coauthoring/tandem_sampler.h"

namespace tandem::rollout {
namespace {

constexpr double kBelowOne = 1.0 - std::numeric_limits<double>::epsilon() / 2;
constexpr float kNever = -std::numeric_limits<float>::infinity();

std::vector<at::Device> Devices() {
  std::vector<at::Device> devices = {at::kCPU};
  if (at::hasCUDA()) devices.emplace_back(at::kCUDA, 0);
  return devices;
}

// As logits that do not fit into one part.
void DrawInTwoParts(const at::Tensor& logits, std::span<const OutputRow> rows,
                    std::span<absl::StatusOr<SampledToken>> results) {
  const size_t half = rows.size() / 2;
  const auto split = static_cast<int64_t>(half);
  DeviceDraws draws;
  draws.Draw(logits.slice(0, 0, split), rows.first(half), results.first(half));
  draws.Draw(logits.slice(0, split), rows.subspan(half), results.subspan(half));
  draws.Send();
  draws.Read();
}

// Expects the results of TandemSampler for logits [N, V].
void ExpectTheSamplersResults(const at::Tensor& logits, const std::vector<OutputRow>& rows) {
  const c10::InferenceMode inference_mode;
  const int64_t width = logits.size(1);
  TandemSampler sampler;
  for (const at::Device device : Devices()) {
    PassResults results(rows.size());
    DrawInTwoParts(logits.to(device), rows, std::span(results));
    for (size_t i = 0; i < rows.size(); ++i) {
      SCOPED_TRACE(testing::Message() << device << ", row " << i);
      ASSERT_TRUE(DrawsOnDevice(rows[i], width));
      const at::Tensor row = logits[static_cast<int64_t>(i)].to(at::kFloat).contiguous();
      const std::span values(row.const_data_ptr<float>(), static_cast<size_t>(width));
      SampledToken expected;
      if (rows[i].token == OutputRow::kDraw) {
        expected = sampler.Sample(values, *rows[i].sampling, rows[i].u).value();
      } else {
        expected.token = rows[i].token;
        expected.logprob =
            sampler.TokenLogProb(values, rows[i].sampling->temperature, rows[i].token).value();
      }
      ASSERT_TRUE(results[i].ok()) << results[i].status();
      EXPECT_EQ(results[i]->token, expected.token);
      if (std::isinf(expected.logprob)) {
        EXPECT_EQ(results[i]->logprob, expected.logprob);
      } else {
        EXPECT_NEAR(results[i]->logprob, expected.logprob, 2e-6 * (1 - expected.logprob));
      }
      EXPECT_NEAR(results[i]->log_keep_mass, expected.log_keep_mass,
                  2e-6 * (1 - expected.log_keep_mass));
      EXPECT_EQ(results[i]->log_keep_mass == 0, expected.log_keep_mass == 0);
    }
  }
}

// Vocabularies of a part of a block, of one block, and of several.
TEST(DeviceSamplerTest, DrawsTheTokensOfTheHostsSampler) {
  at::manual_seed(5);
  const std::vector<SamplingParams> temperatures = {
      {.temperature = 1.0}, {.temperature = 0.6}, {.temperature = 3.0}, {.temperature = 0.0}};
  for (const int64_t width : {1, 61, 2048, 2049, 9001}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      constexpr int64_t kRows = 200;
      const at::Tensor logits = (at::randn({kRows, width}) * 4).to(type);
      std::vector<OutputRow> rows;
      for (int64_t i = 0; i < kRows; ++i) {
        rows.push_back(
            {.u = static_cast<double>(i * 7919 % 1009) / 1009, .sampling = &temperatures[i % 4]});
        if (i % 5 == 0) rows.back().token = static_cast<int32_t>(i * 31 % width);
      }
      rows[1].u = 0;
      rows[2].u = kBelowOne;
      ExpectTheSamplersResults(logits, rows);
    }
  }
}

TEST(DeviceSamplerTest, TokensThatCannotBeAreNotDrawn) {
  const SamplingParams sampling, greedy = {.temperature = 0};
  at::Tensor logits = at::full({6, 5000}, kNever);
  logits.select(1, 2500).fill_(1);
  logits.select(1, 4000).fill_(1);
  logits.select(1, 17).fill_(-200);  // too unlikely to be drawn, but possible
  ExpectTheSamplersResults(logits, {{.u = 0, .sampling = &sampling},
                                    {.u = 0.49, .sampling = &sampling},
                                    {.u = 0.51, .sampling = &sampling},
                                    {.u = kBelowOne, .sampling = &sampling},
                                    {.token = 3, .sampling = &sampling},
                                    {.sampling = &greedy}});
}

TEST(DeviceSamplerTest, RowsThatAreNoNumbersHaveErrorsOfTheirOwn) {
  const SamplingParams sampling, greedy = {.temperature = 0};
  at::Tensor logits = at::zeros({5, 40});
  logits[0][3] = std::nan("");
  logits[1][3] = -kNever;
  logits[2].fill_(kNever);
  logits[3][3] = std::nan("");
  const std::vector<OutputRow> rows = {{.u = 0.5, .sampling = &sampling},
                                       {.u = 0.5, .sampling = &sampling},
                                       {.u = 0.5, .sampling = &sampling},
                                       {.sampling = &greedy},
                                       {.u = 0.5, .sampling = &sampling}};
  for (const at::Device device : Devices()) {
    PassResults results(rows.size());
    DrawInTwoParts(logits.to(device), rows, std::span(results));
    for (int i = 0; i < 4; ++i) EXPECT_EQ(results[i].status(), TandemSampler::BrokenLogits()) << i;
    ASSERT_TRUE(results[4].ok());
    EXPECT_EQ(results[4]->token, 20);
  }
}

TEST(DeviceSamplerTest, CutsKeepTheTokensOfTheHostsSampler) {
  at::manual_seed(6);
  std::vector<SamplingParams> choices = {{}, {.temperature = 0, .top_k = 2}};
  for (const int32_t top_k : {0, 1, 5, 3000}) {
    for (const double top_p : {1.0, 0.7, 0.05}) {
      for (const double min_p : {0.0, 0.2}) {
        choices.push_back({.temperature = 0.8, .top_k = top_k, .top_p = top_p, .min_p = min_p});
      }
    }
  }
  // No two rows of the last width fit into a part that is sorted at a time.
  for (const int64_t width : {1, 61, 4500, 1 << 20}) {
    const int64_t num_rows = width < 5000 ? 200 : 3;
    at::Tensor logits = at::randn({num_rows, width}) * 3;
    logits.slice(0, 0, num_rows, 4).round_();  // many are equal
    std::vector<OutputRow> rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      rows.push_back({.u = static_cast<double>(i * 7919 % 1009) / 1009,
                      .sampling = &choices[static_cast<size_t>(i * 5 + 7) % choices.size()]});
      if (i % 11 == 0) rows.back().token = static_cast<int32_t>(i * 31 % width);
    }
    rows.front().u = 0;
    rows.back().u = kBelowOne;
    ExpectTheSamplersResults(logits, rows);
  }
}

TEST(DeviceSamplerTest, DraftsAreTheHosts) {
  const SamplingParams sampling = {.top_k = 3};
  std::vector<float> distribution;
  EXPECT_TRUE(DrawsOnDevice({.sampling = &sampling}, 10));
  EXPECT_TRUE(DrawsOnDevice({.token = 9, .sampling = &sampling}, 10));
  OutputRow with_draft = {.sampling = &sampling};
  with_draft.proposal.token = 2;
  EXPECT_FALSE(DrawsOnDevice(with_draft, 10));
  EXPECT_FALSE(DrawsOnDevice({.sampling = &sampling, .distribution = &distribution}, 10));
  EXPECT_FALSE(DrawsOnDevice({.token = 10, .sampling = &sampling}, 10));
}

}  // namespace
}  // namespace tandem::rollout
