#include "services/rollout/engine/options_check.h"

#include <cstdint>
#include <filesystem>
#include <map>
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

// The lanes' share of one GPU.
struct GpuShare {
  double fraction = 0;
  bool has_junior = false;
};

// The fractions of lanes on one GPU, of one rank or of several, are at most all of it.
absl::Status CheckMemoryShares(const EngineOptions& options) {
  const int64_t on_machine = options.environment.local_world_size;
  const std::vector<int32_t>& devices = options.layout.junior_gpu_devices;
  std::map<std::pair<int64_t, int64_t>, GpuShare> gpus;  // by machine and index
  const auto gpu_of = [&](int64_t rank) -> std::pair<int64_t, int64_t> {
    return {rank / on_machine, rank % on_machine / options.compute.ranks_per_gpu};
  };
  for (int64_t rank = 0; rank < options.layout.tensor_parallel_size; ++rank) {
    gpus[gpu_of(rank)].fraction += options.senior.gpu_memory_utilization.value_or(0);
  }
  for (int64_t rank = 0; rank < options.layout.junior_tensor_parallel_size; ++rank) {
    if (!options.junior.gpu_memory_utilization.has_value()) break;
    auto gpu = gpu_of(rank);
    const auto index = static_cast<size_t>(rank);
    if (index < devices.size()) gpu.second = devices[index];
    gpus[gpu].fraction += *options.junior.gpu_memory_utilization;
    gpus[gpu].has_junior = true;
  }
  constexpr double kRounding = 1e-9;
  for (const auto& [gpu, share] : gpus) {
    if (share.fraction <= 1 + kRounding) continue;
    const LaneOptions& lane = share.has_junior ? options.junior : options.senior;
    return InvalidField(
        absl::StrCat(share.has_junior ? "junior" : "senior", ".gpu_memory_utilization"),
        absl::StrCat("is ", *lane.gpu_memory_utilization, ", with which the lanes on GPU ",
                     gpu.second, " take ", share.fraction, " of its memory: at most 1 together"));
  }
  return absl::OkStatus();
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
  }
  return CheckMemoryShares(options);
}

}  // namespace tandem::rollout
