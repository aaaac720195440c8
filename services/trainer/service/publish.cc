#include "services/trainer/service/publish.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/machine/host_port.h"

namespace tandem::trainer {
namespace {

constexpr size_t kMaxParallelTargets = 16;

// Calls `work` with each of 0 .. count - 1, in parallel. What it throws is its status.
std::vector<absl::Status> ForEach(size_t count, const CallScope& call,
                                  absl::FunctionRef<absl::Status(size_t index)> work) {
  std::vector<absl::Status> done(count);
  std::atomic<size_t> next = 0;
  const auto take = [&] {
    const ScopedCallLog call_log(call);
    for (size_t i = next++; i < count; i = next++) {
      done[i] = CatchExceptions("publication", [&] { return work(i); });
    }
  };
  {
    std::vector<std::jthread> threads;  // joined at the end of the block, after an exception too
    for (size_t i = 1; i < std::min(count, kMaxParallelTargets); ++i) threads.emplace_back(take);
    take();
  }
  return done;
}

std::string UpdateId(const WeightManifest& manifest) {
  std::string id = absl::StrCat("v", manifest.version, "-", manifest.digest);
  for (const ComponentManifest& component : manifest.components) {
    absl::StrAppend(&id, "-", component.digest);
  }
  return id;
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

Receivers::Receivers(const std::vector<std::string>& targets,
                     const rpc::ChannelOptions& channel_options) {
  for (const std::string& target : targets) {
    stubs_.push_back(
        weights::v1::WeightService::NewStub(rpc::MakeChannel(target, channel_options)));
  }
}

std::vector<absl::StatusOr<rpc::WantedWeights>> Receivers::AskWanted(const CallScope& call) const {
  std::vector<absl::StatusOr<rpc::WantedWeights>> wanted(stubs_.size());
  const std::vector<absl::Status> asked = ForEach(stubs_.size(), call, [&](size_t i) {
    wanted[i] = rpc::AskWanted(*stubs_[i], {.call = call});
    return absl::OkStatus();
  });
  for (size_t i = 0; i < asked.size(); ++i) {
    if (!asked[i].ok()) wanted[i] = asked[i];
  }
  return wanted;
}

std::vector<absl::StatusOr<rpc::SentWeights>> Receivers::Send(const WeightSource& source,
                                                              bool allow_rollback,
                                                              const CallScope& call) const {
  const std::string update_id = UpdateId(source.manifest());
  std::vector<absl::StatusOr<rpc::SentWeights>> deliveries(stubs_.size());
  const std::vector<absl::Status> done = ForEach(stubs_.size(), call, [&](size_t i) {
    deliveries[i] = rpc::SendWeights(*stubs_[i], update_id, source,
                                     {.allow_rollback = allow_rollback, .call = call});
    return absl::OkStatus();
  });
  for (size_t i = 0; i < done.size(); ++i) {
    if (!done[i].ok()) deliveries[i] = done[i];
  }
  return deliveries;
}

}  // namespace tandem::trainer
