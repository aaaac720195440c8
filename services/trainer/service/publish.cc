#include "services/trainer/service/publish.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/machine/host_port.h"

namespace tandem::trainer {
namespace {

constexpr size_t kMaxParallelTargets = 16;

absl::StatusOr<rpc::SentWeights> PublishToOne(const std::string& target, const WeightSource& source,
                                              bool allow_rollback,
                                              const rpc::ChannelOptions& channel_options,
                                              const CallScope& call) {
  const WeightManifest& manifest = source.manifest();
  const auto receiver =
      weights::v1::WeightService::NewStub(rpc::MakeChannel(target, channel_options));
  std::string update_id = absl::StrCat("v", manifest.version, "-", manifest.digest);
  for (const ComponentManifest& component : manifest.components) {
    absl::StrAppend(&update_id, "-", component.digest);
  }
  return rpc::SendWeights(*receiver, update_id, source,
                          {.allow_rollback = allow_rollback, .call = call});
}

}  // namespace

absl::Status CheckTargets(const std::vector<std::string>& targets) {
  if (targets.empty()) return InvalidField("targets", "is empty");
  std::set<std::string> seen;
  for (size_t i = 0; i < targets.size(); ++i) {
    const std::string path = absl::StrCat("targets[", i, "]");
    TANDEM_RETURN_IF_ERROR(CheckHostPort(path, targets[i]));
    if (!seen.insert(targets[i]).second) {
      return InvalidField(path, absl::StrCat(targets[i], " is named twice"));
    }
  }
  return absl::OkStatus();
}

std::vector<absl::StatusOr<rpc::SentWeights>> PublishToAll(
    const std::vector<std::string>& targets, const WeightSource& source, bool allow_rollback,
    const rpc::ChannelOptions& channel_options, const CallScope& call) {
  std::vector<absl::StatusOr<rpc::SentWeights>> deliveries(targets.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    const ScopedCallLog call_log(call);
    for (size_t i = next++; i < targets.size(); i = next++) {
      const absl::Status done = CatchExceptions("publication", [&] {
        deliveries[i] = PublishToOne(targets[i], source, allow_rollback, channel_options, call);
        return absl::OkStatus();
      });
      if (!done.ok()) deliveries[i] = done;
    }
  };
  {
    std::vector<std::jthread> threads;  // joined at the end of the block, after an exception too
    for (size_t i = 1; i < std::min(targets.size(), kMaxParallelTargets); ++i) {
      threads.emplace_back(work);
    }
    work();
  }
  return deliveries;
}

}  // namespace tandem::trainer
