#include "common/steps/weights_lineage.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace tandem::training {

using nlohmann::json;

void WeightsLineage::Record(const WeightsVersion& weights) {
  digests_[weights.version] = weights.digest;
  if (digests_.size() > capacity_) digests_.erase(digests_.begin());
}

std::string WeightsLineage::DigestOf(int64_t version) const {
  const auto found = digests_.find(version);
  return found == digests_.end() ? "" : found->second;
}

json WeightsLineage::ToJson() const {
  json list = json::array();
  for (const auto& [version, digest] : digests_) list.push_back({version, digest});
  return list;
}

absl::Status WeightsLineage::FromJson(const json& list) {
  WeightsLineage loaded(capacity_);
  try {
    for (const json& item : list) {
      if (!item.at(0).is_number_integer() || item.at(0) < 0) {
        return absl::DataLossError("the lineage of the weights holds a broken version");
      }
      loaded.Record({.version = item.at(0), .digest = item.at(1)});
    }
  } catch (const json::exception&) {
    return absl::DataLossError("the lineage of the weights is broken");
  }
  digests_ = std::move(loaded.digests_);
  return absl::OkStatus();
}

}  // namespace tandem::training
