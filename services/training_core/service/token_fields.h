// The tokens and images of messages that hold one prompt and one response.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_TOKEN_FIELDS_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_TOKEN_FIELDS_H_

#include "absl/status/status.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/convert/proto_convert.h"

namespace tandem::training {

// Copies prompt_token_ids and response_token_ids, which must not be empty, and vision_inputs from
// `proto` to `plain`.
template <typename Proto, typename Plain>
absl::Status CopyTokens(const Proto& proto, Plain& plain) {
  const auto& prompt = proto.prompt_token_ids();
  const auto& response = proto.response_token_ids();
  if (prompt.empty()) return InvalidField("prompt_token_ids", "is empty");
  if (response.empty()) return InvalidField("response_token_ids", "is empty");
  plain.prompt_token_ids.assign(prompt.begin(), prompt.end());
  plain.response_token_ids.assign(response.begin(), response.end());
  TANDEM_ASSIGN_OR_RETURN(plain.vision_inputs, rpc::VisionInputsFromProto(proto.vision_inputs()));
  return absl::OkStatus();
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_TOKEN_FIELDS_H_
