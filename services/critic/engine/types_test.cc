#include "services/critic/engine/types.h"

#include <gtest/gtest.h>

#include "common/base/struct_bytes.h"
#include "common/base/testing/no_defaults.h"

namespace tandem::critic {
namespace {

template <typename T>
void ExpectSurvives(const T& request) {
  ExpectNoDefaults(request);
  EXPECT_EQ(FromBytes<T>(ToBytes(request)).value(), request);
}

TEST(TypesTest, AStepSurvivesAsBytes) {
  TrainStepRequest request;
  request.run_id = "run";
  request.step = 3;
  request.request_id = "request";
  request.payload_digest = "payload";
  request.expected_version = 5;
  request.value_clip = 0.5;
  request.updates = {.num_mini_batches = 2, .num_epochs = 3};
  const ValueSample sample = {.prompt_token_ids = {1, 2},
                              .response_token_ids = {3, 4},
                              .old_values = {0.5f, -0.5f},
                              .returns = {1, 2},
                              .loss_mask = {1, 0}};
  request.samples = {sample, sample};
  ExpectSurvives(request);
}

TEST(TypesTest, ARequestForValuesSurvivesAsBytes) {
  ExpectSurvives(ValuesRequest{.prompt_token_ids = {1, 2},
                               .response_token_ids = {3},
                               .run_id = "run",
                               .request_id = "request"});
}

}  // namespace
}  // namespace tandem::critic
