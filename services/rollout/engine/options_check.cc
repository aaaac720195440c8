#include "services/rollout/engine/options_check.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "services/rollout/engine/blocks/lane_storage.h"

namespace tandem::rollout {
namespace {

// Checks that `directory`, its links followed, is ".../snapshots/<revision>", as the cache of the
// Hugging Face Hub has it.
absl::Status CheckRevision(absl::string_view field, const std::string& directory,
                           const std::string& revision) {
  if (revision.empty()) return absl::OkStatus();
  std::error_code error;
  const std::filesystem::path path = std::filesystem::canonical(directory, error);
  // A directory that is missing is an error of the load.
  if (error || (path.filename() == revision && path.parent_path().filename() == "snapshots")) {
    return absl::OkStatus();
  }
  return FieldError(absl::StatusCode::kFailedPrecondition, field,
                    absl::StrCat(path.string(), " is not the snapshot of ", revision,
                                 ", whose directory is snapshots/", revision));
}

// Errors name the field within the lane.
absl::Status CheckLane(const LaneOptions& lane, const ComputeOptions& compute) {
  if (lane.quantization != Quantization::kNone && !HasPackedLanes(compute)) {
    return FieldError(absl::StatusCode::kUnimplemented, "quantization",
                      "needs the CPU's own kernels");
  }
  if (lane.max_model_len < 2) {
    return InvalidField("max_model_len",
                        absl::StrCat("must be enough for a prompt token and a response token, got ",
                                     lane.max_model_len));
  }
  return CheckRevision("model_revision", lane.model, lane.model_revision);
}

// Returns whether a rank of the junior computes on a GPU on which a rank of the senior does.
bool LanesShareAGpu(const EngineOptions& options) {
  const int64_t on_machine = options.environment.local_world_size;
  const std::vector<int32_t>& devices = options.layout.junior_gpu_devices;
  for (int64_t rank = 0; rank < options.layout.junior_tensor_parallel_size; ++rank) {
    const auto index = static_cast<size_t>(rank);
    const int64_t local_rank = rank % on_machine;
    const int64_t device = index < devices.size() ? devices[index] : local_rank;
    const int64_t rank_of_device = rank - local_rank + device;
    if (device < on_machine && rank_of_device < options.layout.tensor_parallel_size) return true;
  }
  return false;
}

absl::Status CheckMemoryShares(const EngineOptions& options) {
  const std::optional<double>& senior = options.senior.gpu_memory_utilization;
  const std::optional<double>& junior = options.junior.gpu_memory_utilization;
  if (!senior.has_value() || !junior.has_value() || *senior + *junior <= 1) {
    return absl::OkStatus();
  }
  if (!LanesShareAGpu(options)) return absl::OkStatus();
  return InvalidField("junior.gpu_memory_utilization",
                      absl::StrCat("is ", *junior, " beside a senior.gpu_memory_utilization of ",
                                   *senior, ": lanes on one GPU have at most 1 together"));
}

}  // namespace

absl::Status CheckOptions(const EngineOptions& options) {
  const std::pair<const char*, int64_t> positive[] = {
      {"max_num_seqs", options.max_num_seqs},
      {"max_batched_tokens", options.max_batched_tokens},
      {"max_queue", options.max_queue}};
  for (const auto& [field, value] : positive) {
    if (value < 1) return InvalidField(field, absl::StrCat("must be at least 1, got ", value));
  }
  if (options.compute.num_threads < 0) {
    return InvalidField("compute.num_threads", "must not be negative");
  }
  if (options.senior.model.empty()) return InvalidField("senior.model", "is required");
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("senior", CheckLane(options.senior, options.compute)));
  if (!options.junior.model.empty()) {
    TANDEM_RETURN_IF_ERROR(PrependFieldPath("junior", CheckLane(options.junior, options.compute)));
    TANDEM_RETURN_IF_ERROR(CheckMemoryShares(options));
  }
  return absl::OkStatus();
}

}  // namespace tandem::rollout
