#include "services/trainer/service/publish.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/error.h"
#include "common/base/logging.h"
#include "common/rpc/weight_sender.h"

namespace tandem::trainer {
namespace {

constexpr size_t kMaxParallelTargets = 16;
constexpr absl::Duration kVersionTimeout = absl::Seconds(10);

bool IsAddress(absl::string_view target) {
  const size_t colon = target.rfind(':');
  int port = 0;
  return colon != absl::string_view::npos && colon > 0 &&
         absl::SimpleAtoi(target.substr(colon + 1), &port) && port > 0 && port < 65536;
}

// True when the receiver already serves exactly these weights. Not knowing is "no": sending says
// more.
bool Serves(weights::v1::WeightService::StubInterface& receiver, const WeightManifest& manifest,
            const rpc::CallContext& context) {
  const auto call = rpc::MakeClientContext(
      std::min(context.deadline, absl::Now() + kVersionTimeout), context.request_id);
  weights::v1::GetVersionResponse version;
  return receiver.GetVersion(call.get(), {}, &version).ok() &&
         version.weights().version() == manifest.version &&
         version.weights().digest() == manifest.digest;
}

Delivery PublishToOne(const std::string& target, const WeightSource& source,
                      const rpc::ChannelOptions& channel_options, const rpc::CallContext& context) {
  const WeightManifest& manifest = source.manifest();
  const auto receiver =
      weights::v1::WeightService::NewStub(rpc::MakeChannel(target, channel_options));
  if (Serves(*receiver, manifest, context)) {
    return {.result = WeightsVersion{manifest.version, manifest.digest}};
  }
  rpc::WeightSenderOptions options;
  options.deadline = context.deadline;
  options.request_id = context.request_id;
  options.cancelled = [&context] { return context.cancelled(); };
  Delivery delivery;
  delivery.result = rpc::SendWeights(
      *receiver, absl::StrCat("v", manifest.version, "-", manifest.digest), source, options);
  if (delivery.result.ok()) delivery.bytes_sent = manifest.total_bytes;
  return delivery;
}

}  // namespace

absl::Status CheckTargets(const std::vector<std::string>& targets) {
  if (targets.empty()) return InvalidField("targets", "is empty");
  std::set<std::string> seen;
  for (size_t i = 0; i < targets.size(); ++i) {
    const std::string path = absl::StrCat("targets[", i, "]");
    if (!IsAddress(targets[i])) {
      return InvalidField(path, absl::StrCat("must be host:port, got \"", targets[i], "\""));
    }
    if (!seen.insert(targets[i]).second) {
      return InvalidField(path, absl::StrCat(targets[i], " is named twice"));
    }
  }
  return absl::OkStatus();
}

std::vector<Delivery> PublishToAll(const std::vector<std::string>& targets,
                                   const WeightSource& source,
                                   const rpc::ChannelOptions& channel_options,
                                   const rpc::CallContext& context) {
  std::vector<Delivery> deliveries(targets.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    const ScopedRequestId request_id(context.request_id);
    for (size_t i = next++; i < targets.size(); i = next++) {
      deliveries[i] = PublishToOne(targets[i], source, channel_options, context);
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(targets.size(), kMaxParallelTargets); ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return deliveries;
}

}  // namespace tandem::trainer
