#include "services/critic/engine/types.h"

#include <gtest/gtest.h>

#include "services/training_core/testing/survives_as_bytes.h"

namespace tandem::critic {
namespace {

using training::ExpectSurvives;
using training::SomeBlobs;
using training::SomeImages;

TEST(TypesTest, AStepSurvivesAsBytes) {
  TrainStepRequest request;
  request.run_id = "run";
  request.step = 3;
  request.request_id = "request";
  request.payload_digest = "payload";
  request.expected_version = 5;
  request.defer_digest = true;
  request.value_clip = 0.5;
  request.updates = {.num_mini_batches = 2, .num_epochs = 3};
  const ValueSample sample = {.prompt_token_ids = {1, 2},
                              .response_token_ids = {3, 4},
                              .old_values = {0.5f, -0.5f},
                              .returns = {1, 2},
                              .loss_mask = {1, 0},
                              .vision_inputs = SomeImages(),
                              .weights = {0, -2, 0.5f}};
  request.samples = {sample, sample};
  request.blobs = SomeBlobs();
  ExpectSurvives(request);
}

TEST(TypesTest, ARequestForValuesSurvivesAsBytes) {
  ExpectSurvives(ValuesRequest{.prompt_token_ids = {1, 2},
                               .response_token_ids = {3},
                               .run_id = "run",
                               .request_id = "request",
                               .vision_inputs = SomeImages(),
                               .blobs = SomeBlobs()});
}

}  // namespace
}  // namespace tandem::critic
