#include "services/training/training_checkpoint.h"

#include <ATen/ATen.h>

#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/base/atomic_file.h"
#include "common/base/bounded_json.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/path_check.h"
#include "common/base/status_macros.h"
#include "common/base/struct_bytes.h"
#include "common/checkpoint/temporary_directory.h"
#include "common/model/family.h"
#include "common/model/stacked_tensors.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/tensor/safetensors.h"

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

// Reads the weights, which must be exactly the parameters of `model`, with finite numbers, but for
// the tensors that it keeps without reading them.
absl::StatusOr<SourceParameters> ReadWeights(const std::string& path, const Model& model) {
  const std::string file = absl::StrCat(path, "/", kWeightsFile);
  TANDEM_ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsFile> opened,
                          SafetensorsFile::Open(file));
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(model.config().model_type));
  const auto fail = [&](absl::string_view why) {
    return InvalidField("path", absl::StrCat(path, " holds another model: ", why));
  };
  std::vector<const TensorView*> tensors;
  for (const TensorView& tensor : opened->tensors()) tensors.push_back(&tensor);
  std::deque<TensorView> unstacked;
  if (const absl::Status status = Unstack(model.StackedTensors(), file, tensors, unstacked);
      !status.ok()) {
    return fail(status.message());
  }
  std::map<std::string, const TensorView*> by_name;
  for (const TensorView* tensor : tensors) by_name[tensor->name] = tensor;
  SourceParameters weights{.files = opened, .tensors = {}};
  for (const Parameter& parameter : model.DeclaredParameters()) {
    const std::string& name = parameter.spec.name;
    const auto found = by_name.extract(name);
    if (found.empty() || found.mapped()->shape != parameter.spec.shape ||
        !c10::isFloatingType(ToScalarType(found.mapped()->dtype))) {
      return fail(absl::StrCat("tensor '", name, "' is missing or has another shape or type"));
    }
    weights.tensors.emplace_back(name, AliasAsAten(*found.mapped()));
    if (!at::isfinite(weights.tensors.back().second).all().item<bool>()) {
      return absl::DataLossError(
          absl::StrCat(file, ": tensor '", name, "' holds a number that is not finite"));
    }
  }
  for (const auto& [name, tensor] : by_name) {
    if (family->KeepsTensor(model.config(), name)) continue;
    return fail(absl::StrCat("tensor '", name, "' is not expected"));
  }
  return weights;
}

// Runs `body` on rank 0 alone, and returns its result on every rank.
absl::Status OnRankZero(parallel::Strategy& strategy, absl::FunctionRef<absl::Status()> body) {
  return ranks::FromRankZero<std::string>(strategy.ranks(),
                                          [&]() -> absl::StatusOr<std::string> {
                                            TANDEM_RETURN_IF_ERROR(body());
                                            return std::string();
                                          })
      .status();
}

absl::Status WriteState(const std::string& directory, int64_t optimizer_steps,
                        const TrainingState& state) {
  json text = ToJson(state);
  text["optimizer_steps"] = optimizer_steps;
  return WriteFileDurably(
      absl::StrCat(directory, "/", kStateFile),
      text.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + "\n");
}

absl::Status SaveModel(parallel::Strategy& strategy, const std::string& directory, DType dtype) {
  return parallel::UseWholeParameters(strategy, [&](TensorSource parameters) {
    return strategy.model().Save(directory, dtype, parameters);
  });
}

}  // namespace

absl::StatusOr<checkpoint::Saved> SaveTraining(const std::string& directory,
                                               const std::string& name, int64_t keep,
                                               parallel::Strategy& strategy,
                                               const TrainingState& state, Companion* companion,
                                               const std::vector<std::string>& in_use) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("keep", keep, 0));
  const checkpoint::Identity identity = {.kind = state.kind,
                                         .step = state.version,
                                         .run_id = std::string(state.ledger.newest_run_id())};
  std::optional<checkpoint::PendingCheckpoint> pending;  // on rank 0 alone
  TANDEM_ASSIGN_OR_RETURN(
      const std::string target,
      ranks::FromRankZero<std::string>(strategy.ranks(), [&]() -> absl::StatusOr<std::string> {
        TANDEM_ASSIGN_OR_RETURN(checkpoint::PendingCheckpoint begun,
                                checkpoint::PendingCheckpoint::Begin(directory, name, identity));
        return pending.emplace(std::move(begun)).directory();
      }));
  TANDEM_RETURN_IF_ERROR(SaveModel(strategy, target, DType::kFloat32));
  const bool trains = strategy.model().num_trainable_parameters() > 0;
  if (trains) {
    TANDEM_RETURN_IF_ERROR(ranks::Agree(strategy.ranks(), strategy.SaveOptimizer(target)));
  }
  TANDEM_ASSIGN_OR_RETURN(
      const checkpoint::Saved saved,
      ranks::FromRankZero<checkpoint::Saved>(
          strategy.ranks(), [&]() -> absl::StatusOr<checkpoint::Saved> {
            const int64_t optimizer_steps = trains                 ? strategy.optimizer_steps()
                                            : companion != nullptr ? companion->updates()
                                                                   : 0;
            TANDEM_RETURN_IF_ERROR(WriteState(target, optimizer_steps, state));
            if (companion != nullptr) TANDEM_RETURN_IF_ERROR(companion->Save(target));
            TANDEM_ASSIGN_OR_RETURN(const checkpoint::Saved committed,
                                    (*std::move(pending)).Commit());
            TANDEM_RETURN_IF_ERROR(checkpoint::Prune(committed.path, identity, keep, in_use));
            return committed;
          }));
  return saved;
}

absl::StatusOr<TrainingCheckpoint> ReadTraining(const std::string& path,
                                                parallel::Strategy& strategy,
                                                const std::string& kind) {
  // Rank 0 alone: it may put a checkpoint back that a crash has left aside.
  TANDEM_RETURN_IF_ERROR(OnRankZero(strategy, [&] { return checkpoint::Verify(path); }));
  TrainingCheckpoint read;
  const absl::Status status = CatchTorchErrors("checkpoint", [&]() -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(read.state, ReadState(path, kind));
    TANDEM_ASSIGN_OR_RETURN(read.weights, ReadWeights(path, strategy.model()));
    return absl::OkStatus();
  });
  TANDEM_RETURN_IF_ERROR(ranks::Agree(strategy.ranks(), status));
  return read;
}

absl::Status ExportModel(parallel::Strategy& strategy, const std::string& path, DType dtype) {
  std::error_code error;
  fs::path target = fs::absolute(path, error).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "model/" is "model"
  std::optional<checkpoint::TemporaryDirectory> temporary;    // on rank 0 alone
  const auto create = [&]() -> absl::StatusOr<std::string> {
    TANDEM_ASSIGN_OR_RETURN(checkpoint::TemporaryDirectory created,
                            checkpoint::TemporaryDirectory::Create(target.parent_path().string(),
                                                                   target.filename().string()));
    return temporary.emplace(std::move(created)).path();
  };
  TANDEM_ASSIGN_OR_RETURN(
      const std::string directory,
      ranks::FromRankZero<std::string>(strategy.ranks(), [&]() -> absl::StatusOr<std::string> {
        TANDEM_RETURN_IF_ERROR(CheckPath("path", path));
        if (fs::exists(path, error)) {
          return FieldError(absl::StatusCode::kAlreadyExists, "path",
                            absl::StrCat(path, " exists"));
        }
        absl::StatusOr<std::string> created = create();
        return created.ok() ? created : PrependFieldPath("path", created.status());
      }));
  absl::Status status = SaveModel(strategy, directory, dtype);
  if (status.ok()) {
    status = OnRankZero(strategy, [&] { return RenameDurably(directory, target.string()); });
  }
  return PrependFieldPath("path", status);
}

}  // namespace tandem::training
