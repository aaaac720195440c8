// Fuzz target: the YAML configuration of each of the three servers.
#include "common/config/server_config.h"

#include <google/protobuf/util/message_differencer.h>

#include "absl/strings/string_view.h"
#include "common/config/config.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

template <typename Config>
void Try(absl::string_view text) {
  using google::protobuf::util::MessageDifferencer;
  using tandem::fuzz::Require;
  Config config;
  absl::Status status = tandem::config::MergeYaml(text, &config);
  if (status.ok()) status = tandem::config::Resolve(&config);
  if (!status.ok()) {
    tandem::fuzz::RequireRefusal(status);
    return;
  }
  Config again;
  Require(tandem::config::MergeYaml(tandem::config::ToYaml(config), &again).ok(),
          "a resolved configuration can be read");
  Require(MessageDifferencer::Equals(config, again),
          "a resolved configuration reads back as it was");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  Try<tandem::config::RolloutServerConfig>(text);
  Try<tandem::config::TrainerServerConfig>(text);
  Try<tandem::config::CriticServerConfig>(text);
  return 0;
}
