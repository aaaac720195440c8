#include "common/steps/kept_values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/base/checksum.h"
#include "common/base/errors/field_check.h"
#include "common/base/struct_bytes.h"

namespace tandem::training {

using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little);

struct IsOf {
  const std::string& run_id;
  const std::string& request_id;

  bool operator()(const KeptValues::Step& step) const {
    return step.run_id == run_id && step.request_id == request_id;
  }
};

// Takes the values of a sequence from the front of `bytes`; false where there are fewer.
bool TakeValues(const json& count, absl::string_view& bytes, SequenceValues& sequence) {
  if (!count.is_number_unsigned()) return false;
  const auto values = count.get<uint64_t>();
  if (values >= bytes.size() / sizeof(float)) return false;
  sequence.values.resize(values);
  std::memcpy(sequence.values.data(), bytes.data(), values * sizeof(float));
  std::memcpy(&sequence.final_value, bytes.data() + values * sizeof(float), sizeof(float));
  bytes.remove_prefix((values + 1) * sizeof(float));
  return true;
}

}  // namespace

const KeptValues::Step* KeptValues::Find(const std::string& run_id,
                                         const std::string& request_id) const {
  const auto found = std::ranges::find_if(steps_, IsOf{run_id, request_id});
  return found == steps_.end() ? nullptr : &*found;
}

KeptValues::Step& KeptValues::Open(const std::string& run_id, const std::string& request_id,
                                   const WeightsVersion& weights) {
  const auto found = std::ranges::find_if(steps_, IsOf{run_id, request_id});
  if (found != steps_.end()) {
    if (found->weights.version != weights.version) *found = {run_id, request_id, weights, {}};
    return *found;
  }
  if (steps_.size() == max_steps_) steps_.pop_front();
  return steps_.emplace_back(Step{run_id, request_id, weights, {}});
}

std::string KeptValues::SequenceDigest(absl::Span<const int32_t> prompt,
                                       absl::Span<const int32_t> response,
                                       absl::Span<const VisionReference> images) {
  Checksum checksum;
  const size_t prompt_length = prompt.size();  // without it, a token could move between the two
  checksum.Update(&prompt_length, sizeof(prompt_length));
  checksum.Update(prompt.data(), prompt.size() * sizeof(int32_t));
  checksum.Update(response.data(), response.size() * sizeof(int32_t));
  for (const VisionReference& image : images) {
    const std::string bytes = ToBytes(image);
    checksum.Update(bytes.data(), bytes.size());
  }
  return checksum.Hex();
}

json KeptValues::ToJson() const {
  json list = json::array();
  for (const Step& step : steps_) {
    json sequences = json::object();
    for (const auto& [digest, sequence] : step.by_sequence) {
      sequences[digest] = sequence.values.size();
    }
    list.push_back({{"run_id", step.run_id},
                    {"request_id", step.request_id},
                    {"version", step.weights.version},
                    {"digest", step.weights.digest},
                    {"sequences", std::move(sequences)}});
  }
  return list;
}

std::string KeptValues::Bytes() const {
  std::string bytes;
  const auto append = [&](const float* values, size_t count) {
    bytes.append(reinterpret_cast<const char*>(values), count * sizeof(float));
  };
  for (const Step& step : steps_) {
    for (const auto& [digest, sequence] : step.by_sequence) {
      append(sequence.values.data(), sequence.values.size());
      append(&sequence.final_value, 1);
    }
  }
  return bytes;
}

absl::Status KeptValues::FromJson(const json& list, absl::string_view bytes) {
  std::deque<Step> steps;
  try {
    for (const json& item : list) {
      Step step{item.at("run_id"),
                item.at("request_id"),
                {.version = item.at("version"), .digest = item.at("digest")},
                {}};
      for (const auto& [digest, sequence] : item.at("sequences").items()) {
        SequenceValues values;
        if (sequence.is_object()) {
          values = {sequence.at("values").get<std::vector<float>>(), sequence.at("final_value")};
        } else if (!TakeValues(sequence, bytes, values)) {
          return absl::DataLossError("the number of kept values is not the one in the state");
        }
        if (!std::isfinite(values.final_value) || !CheckFinite("values", values.values).ok()) {
          return absl::DataLossError("the kept values include one that is not finite");
        }
        step.by_sequence[digest] = std::move(values);
      }
      steps.push_back(std::move(step));
    }
  } catch (const json::exception&) {
    return absl::DataLossError("the kept values are broken");
  }
  if (!bytes.empty()) {
    return absl::DataLossError("the number of kept values is not the one in the state");
  }
  while (steps.size() > max_steps_) steps.pop_front();
  steps_ = std::move(steps);
  return absl::OkStatus();
}

}  // namespace tandem::training
