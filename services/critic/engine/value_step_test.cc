#include "services/critic/engine/value_step.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "common/base/errors/error.h"

namespace tandem::critic {
namespace {

TrainStepRequest Request() {
  TrainStepRequest request;
  request.samples = {{.prompt_token_ids = {1},
                      .response_token_ids = {2, 3},
                      .old_values = {0, 0},
                      .returns = {1, 1},
                      .loss_mask = {1, 0}}};
  return request;
}

TrainStepRequest WeightedRequest() {
  const ValueSample sample = {
      .prompt_token_ids = {1}, .response_token_ids = {2, 3}, .weights = {0, 0, -1}};
  TrainStepRequest request;
  request.samples = {sample, sample};
  return request;
}

TEST(ValueStepTest, DamageIsRefusedWithCodeAndPath) {
  struct Case {
    std::function<void(TrainStepRequest&)> damage;
    absl::StatusCode code;
    const char* path;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const Case cases[] = {
      {[](auto& r) { r.samples[0].old_values.pop_back(); }, kInvalid, "samples[0].old_values"},
      {[](auto& r) { r.samples[0].returns[1] = std::numeric_limits<float>::infinity(); }, kInvalid,
       "samples[0].returns[1]"},
      {[](auto& r) { r.samples[0].loss_mask.pop_back(); }, kInvalid, "samples[0].loss_mask"},
      {[](auto& r) { r.samples[0].loss_mask[0] = 2; }, kInvalid, "samples[0].loss_mask[0]"},
      {[](auto& r) {
         r.samples[0].loss_mask = {0, 0};
       },
       kInvalid, "samples"},
      {[](auto& r) { r.samples[0].response_token_ids[1] = 9; }, kInvalid,
       "samples[0].response_token_ids[1]"},
      {[](auto& r) { r.samples[0].prompt_token_ids.assign(20, 1); }, absl::StatusCode::kOutOfRange,
       "samples[0].response_token_ids"},
      {[](auto& r) { r.samples.clear(); }, kInvalid, "samples"},
      {[](auto& r) { r.samples.resize(5, r.samples[0]); }, absl::StatusCode::kOutOfRange,
       "samples"},
      {[](auto& r) { r.value_clip = -1; }, kInvalid, "value_clip"},
      {[](auto& r) { r.updates.num_epochs = 0; }, kInvalid, "num_epochs"},
      {[](auto& r) { r.updates.num_mini_batches = -1; }, kInvalid, "num_mini_batches"},
  };
  const training::SequenceLimits limits = {.num_token_ids = 9, .max_model_len = 8};
  EXPECT_TRUE(CheckTrainStep(Request(), limits, 4).ok());
  EXPECT_TRUE(CheckTrainStep(WeightedRequest(), limits, 4).ok());
  const Case weighted_cases[] = {
      {[](auto& r) { r.samples[1].weights.pop_back(); }, kInvalid, "samples[1].weights"},
      {[](auto& r) { r.samples[0].weights[2] = std::numeric_limits<float>::quiet_NaN(); }, kInvalid,
       "samples[0].weights[2]"},
      {[](auto& r) { r.samples[1] = Request().samples[0]; }, kInvalid, "samples[1].weights"},
      {[](auto& r) { r.samples[0] = Request().samples[0]; }, kInvalid, "samples[1].weights"},
      {[](auto& r) { r.updates.num_epochs = 2; }, kInvalid, "num_epochs"},
      {[](auto& r) { r.updates.num_mini_batches = 2; }, kInvalid, "num_mini_batches"},
  };
  for (const Case& c : weighted_cases) {
    TrainStepRequest request = WeightedRequest();
    c.damage(request);
    const absl::Status status = CheckTrainStep(request, limits, 4);
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_EQ(FieldPath(status).value_or(""), c.path);
  }
  for (const Case& c : cases) {
    TrainStepRequest request = Request();
    c.damage(request);
    const absl::Status status = CheckTrainStep(request, limits, 4);
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_EQ(FieldPath(status).value_or(""), c.path);
  }
}

}  // namespace
}  // namespace tandem::critic
