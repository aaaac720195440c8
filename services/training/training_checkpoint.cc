#include "services/training/training_checkpoint.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/atomic_file.h"
#include "common/base/bounded_json.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/path_check.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/temporary_directory.h"
#include "common/tensor/aten_bytes.h"

namespace tandem::training {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kStateFile[] = "tandem_state.json";
constexpr char kWeightsFile[] = "model.safetensors";

absl::StatusOr<TrainingState> ReadState(const std::string& path, const std::string& kind) {
  const std::string file = absl::StrCat(path, "/", kStateFile);
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  const absl::StatusOr<json> parsed = ParseBoundedJson(text, file);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  absl::StatusOr<TrainingState> state = TrainingStateFromJson(*parsed);
  if (!state.ok()) {
    return absl::DataLossError(absl::StrCat(file, ": ", state.status().message()));
  }
  if (state->kind != kind) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is a checkpoint of a ", state->kind, ", not of a ", kind));
  }
  return state;
}

// Whether `weights` are exactly the parameters of `model`, and could be the result of training.
absl::Status CheckFits(const NamedTensors& weights, const Model& model, const std::string& path) {
  std::map<std::string, at::Tensor> given(weights.begin(), weights.end());
  for (const auto& [name, parameter] : model.Parameters()) {
    const auto found = given.find(name);
    if (found == given.end() || found->second.sizes() != parameter.sizes() ||
        !found->second.is_floating_point()) {
      return InvalidField("path", absl::StrCat(path, " holds another model: tensor '", name,
                                               "' is missing or has another shape or type"));
    }
    if (!at::isfinite(found->second).all().item<bool>()) {
      return absl::DataLossError(absl::StrCat(path, "/", kWeightsFile, ": tensor '", name,
                                              "' holds a number that is not finite"));
    }
    given.erase(found);
  }
  if (given.empty()) return absl::OkStatus();
  return InvalidField("path", absl::StrCat(path, " holds another model: tensor '",
                                           given.begin()->first, "' is not expected"));
}

}  // namespace

absl::StatusOr<checkpoint::Saved> SaveTraining(const std::string& directory,
                                               const std::string& name, int64_t keep,
                                               const Model& model, parallel::Strategy& strategy,
                                               const TrainingState& state) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("keep", keep, 0));
  TANDEM_ASSIGN_OR_RETURN(
      const checkpoint::Saved saved,
      checkpoint::Save(
          directory, name, {.kind = state.kind, .step = state.version},
          [&](const std::string& target) -> absl::Status {
            TANDEM_RETURN_IF_ERROR(model.Save(target));
            TANDEM_RETURN_IF_ERROR(strategy.SaveOptimizer(target));
            json text = ToJson(state);
            text["optimizer_steps"] = strategy.optimizer_steps();
            return WriteFileDurably(
                absl::StrCat(target, "/", kStateFile),
                text.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + "\n");
          }));
  TANDEM_RETURN_IF_ERROR(checkpoint::Prune(directory, state.kind, keep, saved.path));
  return saved;
}

absl::StatusOr<TrainingCheckpoint> ReadTraining(const std::string& path, const Model& model,
                                                const std::string& kind) {
  TANDEM_RETURN_IF_ERROR(checkpoint::Verify(path));
  TrainingCheckpoint read;
  TANDEM_ASSIGN_OR_RETURN(read.state, ReadState(path, kind));
  TANDEM_ASSIGN_OR_RETURN(read.weights, ReadNamedTensors(absl::StrCat(path, "/", kWeightsFile)));
  TANDEM_RETURN_IF_ERROR(CheckFits(read.weights, model, path));
  return read;
}

absl::Status ExportModel(const Model& model, const std::string& path, DType dtype) {
  std::error_code error;
  TANDEM_RETURN_IF_ERROR(CheckPath("path", path));
  if (fs::exists(path, error)) {
    return FieldError(absl::StatusCode::kAlreadyExists, "path", absl::StrCat(path, " exists"));
  }
  fs::path target = fs::absolute(path, error).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "model/" is "model"
  const auto write = [&]() -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(const checkpoint::TemporaryDirectory temporary,
                            checkpoint::TemporaryDirectory::Create(target.parent_path().string(),
                                                                   target.filename().string()));
    TANDEM_RETURN_IF_ERROR(model.Save(temporary.path(), dtype));
    return RenameDurably(temporary.path(), target.string());
  };
  return PrependFieldPath("path", write());
}

}  // namespace tandem::training
