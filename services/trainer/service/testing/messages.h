// Valid messages for the tests of this folder.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_TESTING_MESSAGES_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_TESTING_MESSAGES_H_

#include <string>
#include <vector>

#include "common/coauthoring/testing/authors.h"
#include "common/rpc/convert/proto_convert.h"
#include "tandem/trainer/v1/trainer.pb.h"

namespace tandem::trainer {

inline v1::TrainStepHeader PolicyHeader(int num_samples, const std::string& request_id = "r-1") {
  v1::TrainStepHeader header;
  header.set_run_id("run");
  header.set_step(1);
  header.set_request_id(request_id);
  header.set_expected_version(0);
  header.set_num_samples(num_samples);
  header.mutable_policy();
  return header;
}

// Two response tokens, one of each author.
inline v1::PolicySample Sample() {
  Trajectory trajectory;
  trajectory.prompt_token_ids = {1, 2};
  trajectory.response_token_ids = {3, 4};
  trajectory.authorship_mask = Authors("SJ");
  trajectory.author_logprobs = {-0.5f, -1.5f};
  trajectory.other_logprobs = {-0.75f, -1.25f};
  trajectory.senior_versions = {{{0, "digest"}, 2}};
  trajectory.junior_version = "junior";
  trajectory.finish_reason = FinishReason::kLength;
  trajectory.sampling.max_tokens = 2;
  v1::PolicySample sample;
  rpc::TrajectoryToProto(trajectory, sample.mutable_trajectory());
  sample.set_group_id("g");
  sample.set_reward(1.0);
  return sample;
}

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_TESTING_MESSAGES_H_
