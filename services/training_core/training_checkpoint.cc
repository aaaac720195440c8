#include "services/training_core/training_checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/base/bounded_json.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_writer.h"
#include "common/base/files/paths/path_check.h"
#include "common/checkpoint/replace_directory.h"
#include "common/checkpoint/temporary_directory.h"
#include "common/model/family.h"
#include "common/model/loading/peft_files.h"
#include "common/model/loading/stacked_tensors.h"
#include "common/parallel/held_values.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/tensor_copies.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem::training {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kStateFile[] = "tandem_state.json";
// The values that a critic keeps for repeats of steps; absent without any.
constexpr char kKeptValuesFile[] = "kept_values.bin";

absl::StatusOr<TrainingState> ReadState(const std::string& path, const std::string& kind) {
  const std::string file = absl::StrCat(path, "/", kStateFile);
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  const absl::StatusOr<json> parsed = ParseBoundedJson(text, file);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  absl::StatusOr<std::string> kept = ReadFile(absl::StrCat(path, "/", kKeptValuesFile));
  if (!kept.ok() && !absl::IsNotFound(kept.status())) return kept.status();
  absl::StatusOr<TrainingState> state = TrainingStateFromJson(*parsed, kept.ok() ? *kept : "");
  if (!state.ok()) {
    return absl::DataLossError(absl::StrCat(file, ": ", state.status().message()));
  }
  if (state->kind != kind) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is a checkpoint of a ", state->kind, ", not of a ", kind));
  }
  return state;
}

absl::Status HoldsAnotherModel(absl::string_view path, absl::string_view why) {
  return InvalidField("path", absl::StrCat(path, " holds a different model: ", why));
}

// Whether the file has the tensor of a parameter.
bool Fits(const TensorView& tensor, const ParameterSpec& spec) {
  return tensor.shape == spec.shape && c10::isFloatingType(ToScalarType(tensor.dtype));
}

// Checks the numbers of a tensor that this rank loads.
absl::Status CheckFinite(const TensorView& tensor, const Parameter& parameter,
                         parallel::Strategy& strategy) {
  const at::Tensor part = strategy.PartOf(AliasAsAten(tensor), parameter);
  if (!part.defined() || parallel::AllFinite(part)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(tensor.file, ": tensor '", parameter.spec.name,
                                          "' holds a number that is not finite"));
}

// The files behind the parameters of a model with adapters.
struct AdapterFiles {
  std::unique_ptr<SafetensorsFile> adapters;
  std::shared_ptr<const void> base;
};

// The same as ReadWeights for a model with adapters: they, and what trains beside them, come from
// the checkpoint, the rest from the files that the model was loaded from.
absl::StatusOr<SourceParameters> ReadAdapters(const std::string& path,
                                              parallel::Strategy& strategy) {
  const Model& model = strategy.model();
  LoraOptions options = model.lora();
  options.path = path;
  const absl::StatusOr<LoraOptions> saved = ResolveLora(options);
  if (!saved.ok()) return HoldsAnotherModel(path, saved.status().message());
  auto files = std::make_shared<AdapterFiles>();
  TANDEM_ASSIGN_OR_RETURN(files->adapters,
                          SafetensorsFile::Open(absl::StrCat(path, "/", kAdapterWeightsFile)));
  TANDEM_ASSIGN_OR_RETURN(SourceParameters weights, model.ReadSource());
  if (weights.Mark() != model.source_mark()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the files of the model have changed since the server started, and the adapters in ", path,
        " are those of the former ones"));
  }
  files->base = std::move(weights.files);
  size_t found = 0;
  for (size_t i = 0; i < weights.tensors.size(); ++i) {
    const Parameter& parameter = model.DeclaredParameters()[i];
    if (!model.IsInAdapterFile(parameter)) continue;
    const TensorView* const tensor =
        files->adapters->Find(absl::StrCat(kPeftPrefix, parameter.spec.name));
    if (tensor == nullptr || !Fits(*tensor, parameter.spec)) {
      return HoldsAnotherModel(path, absl::StrCat("tensor '", parameter.spec.name,
                                                  "' is missing or has a different shape or type"));
    }
    TANDEM_RETURN_IF_ERROR(CheckFinite(*tensor, parameter, strategy));
    weights.tensors[i].second = AliasAsAten(*tensor);
    ++found;
  }
  if (found < files->adapters->tensors().size()) {
    return HoldsAnotherModel(path, "it has adapters of maps that have none here");
  }
  weights.files = std::move(files);
  return weights;
}

// Opens the weights, which must be exactly the parameters of the model, but for the tensors that it
// keeps; of those that this rank loads, the numbers must be finite. Others are not read.
absl::StatusOr<SourceParameters> ReadWeights(const std::string& path,
                                             parallel::Strategy& strategy) {
  const Model& model = strategy.model();
  if (model.lora().enabled()) return ReadAdapters(path, strategy);
  TANDEM_ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsDirectory> opened,
                          SafetensorsDirectory::Open(path));
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(model.config().model_type));
  const auto fail = [&](absl::string_view why) { return HoldsAnotherModel(path, why); };
  std::vector<const TensorView*> tensors;
  for (const TensorView& tensor : opened->tensors()) tensors.push_back(&tensor);
  std::deque<TensorView> unstacked;
  if (const absl::Status status = Unstack(model.StackedTensors(), path, tensors, unstacked);
      !status.ok()) {
    return fail(status.message());
  }
  std::map<std::string, const TensorView*> by_name;
  for (const TensorView* tensor : tensors) by_name[tensor->name] = tensor;
  SourceParameters weights{.files = opened, .tensors = {}};
  for (const Parameter& parameter : model.DeclaredParameters()) {
    const std::string& name = parameter.spec.name;
    const auto found = by_name.extract(name);
    if (found.empty() || !Fits(*found.mapped(), parameter.spec)) {
      return fail(absl::StrCat("tensor '", name, "' is missing or has a different shape or type"));
    }
    weights.tensors.emplace_back(name, AliasAsAten(*found.mapped()));
    TANDEM_RETURN_IF_ERROR(CheckFinite(*found.mapped(), parameter, strategy));
  }
  for (const auto& [name, tensor] : by_name) {
    if (family->KeepsTensor(model.config(), name)) continue;
    return fail(absl::StrCat("tensor '", name, "' is not expected"));
  }
  return weights;
}

// Runs `body` on rank 0 alone, and returns its result on every rank.
absl::Status OnRankZero(ranks::Communicator& ranks, absl::FunctionRef<absl::Status()> body) {
  return ranks::FromRankZero<std::string>(ranks,
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
  if (const std::string kept = state.kept_values.Bytes(); !kept.empty()) {
    TANDEM_RETURN_IF_ERROR(WriteFileDurably(absl::StrCat(directory, "/", kKeptValuesFile), kept));
  }
  return WriteFileDurably(
      absl::StrCat(directory, "/", kStateFile),
      text.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + "\n");
}

// The files of the weights that this rank writes.
class WeightFiles {
 public:
  // A model directory: every rank writes a file of the weights, rank 0 also the files beside them.
  static WeightFiles OfModel(parallel::Strategy& strategy, DType dtype) {
    WeightFiles files(strategy);
    files.plan_ = files.model_->PlanExport(dtype, strategy.ranks().size());
    return files;
  }
  // The weights of a checkpoint: all, or of a model with adapters those that train, as a directory
  // that PEFT loads.
  static WeightFiles OfCheckpoint(parallel::Strategy& strategy) {
    return strategy.model().lora().enabled() ? WeightFiles(strategy)
                                             : OfModel(strategy, DType::kFloat32);
  }

  // Calls `use` with the tensors of this rank's files. Collective.
  absl::Status Use(parallel::Strategy& strategy,
                   absl::FunctionRef<absl::Status(TensorSource tensors)> use) const {
    if (!plan_.has_value()) {
      return parallel::UseWholeParameters(
          strategy,
          [this](const Parameter& parameter) { return model_->IsInAdapterFile(parameter); }, use);
    }
    return parallel::UseParametersOn(
        strategy,
        [this](const Parameter& parameter) {
          return plan_->file_of_parameter.at(parameter.spec.name);
        },
        use);
  }

  // Writes the files, with those tensors.
  absl::Status Write(const std::string& directory, TensorSource tensors) const {
    if (!plan_.has_value()) {
      return rank_ == 0 ? model_->SaveAdapters(directory, tensors) : absl::OkStatus();
    }
    if (rank_ < plan_->count) {
      TANDEM_RETURN_IF_ERROR(model_->SaveFile(directory, *plan_, rank_, tensors));
    }
    return rank_ == 0 ? model_->SaveCompanionFiles(directory, *plan_) : absl::OkStatus();
  }

  // Writes the files, with the tensors as they are now. Collective.
  absl::Status Save(parallel::Strategy& strategy, const std::string& directory) const {
    return Use(strategy, [&](TensorSource tensors) { return Write(directory, tensors); });
  }

 private:
  explicit WeightFiles(parallel::Strategy& strategy)
      : model_(&strategy.model()), rank_(strategy.ranks().rank()) {}

  const Model* model_;
  int rank_;
  std::optional<Model::ExportPlan> plan_;  // nullopt: adapters
};

// Enters the folder on every rank; `field` is that of the request.
absl::Status EnterOnAllRanks(ranks::Communicator& ranks, absl::string_view field,
                             const ConfinedPath& path, ConfinedFolder::Missing missing,
                             std::optional<ConfinedFolder>& folder) {
  const auto enter = [&](ConfinedFolder::Missing how) -> absl::Status {
    absl::StatusOr<ConfinedFolder> entered = ConfinedFolder::Enter(path, how);
    if (!entered.ok()) return PrependFieldPath(field, entered.status());
    folder.emplace(*std::move(entered));
    return absl::OkStatus();
  };
  TANDEM_RETURN_IF_ERROR(OnRankZero(ranks, [&] { return enter(missing); }));
  return ranks::Agree(
      ranks, ranks.rank() == 0 ? absl::OkStatus() : enter(ConfinedFolder::Missing::kIsError));
}

// Returns the files that all ranks have written.
absl::StatusOr<std::vector<WrittenFile>> FilesOfAllRanks(ranks::Communicator& ranks,
                                                         const std::vector<WrittenFile>& written) {
  std::vector<WrittenFile> all;
  TANDEM_ASSIGN_OR_RETURN(auto of_ranks, ranks::GatherStructs(ranks, written));
  for (std::vector<WrittenFile>& files : of_ranks) {
    std::move(files.begin(), files.end(), std::back_inserter(all));
  }
  return all;
}

// Copies the tensors that `source` gives. Those of one process that do not train are not copied:
// nothing changes them but a load, which waits for saves.
absl::StatusOr<NamedTensors> CopyTensors(parallel::Strategy& strategy, TensorSource source,
                                         TensorCopies& copies) {
  std::set<std::string> unchanging;
  if (strategy.ranks().size() == 1) {
    for (const Parameter& parameter : strategy.model().DeclaredParameters()) {
      if (!parameter.trainable) unchanging.insert(parameter.spec.name);
    }
  }
  NamedTensors copied;
  TANDEM_RETURN_IF_ERROR(
      source([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
        if (tensor.is_cpu() && unchanging.contains(name)) {
          copied.emplace_back(name, tensor.detach());
          return absl::OkStatus();
        }
        TANDEM_ASSIGN_OR_RETURN(at::Tensor copy, copies.Add(tensor));
        copied.emplace_back(name, std::move(copy));
        return absl::OkStatus();
      }));
  // Tensors of other ranks are gone after the visit.
  TANDEM_RETURN_IF_ERROR(copies.Finish());
  return copied;
}

using WriteFiles = std::function<absl::Status(const std::string& directory)>;

// Returns the number of updates that a checkpoint records.
int64_t OptimizerSteps(const SaveSource& source) {
  if (source.strategy.model().num_trainable_parameters() > 0) {
    return source.strategy.optimizer_steps();
  }
  return source.companion != nullptr ? source.companion->updates() : 0;
}

// Copies all that this rank writes; returns what writes it.
absl::StatusOr<WriteFiles> CopyState(const SaveSource& source, TensorCopies& copies) {
  parallel::Strategy& strategy = source.strategy;
  ranks::Communicator& ranks = *strategy.ranks().patient();
  copies.Begin();
  const WeightFiles files = WeightFiles::OfCheckpoint(strategy);
  NamedTensors weights;
  TANDEM_RETURN_IF_ERROR(files.Use(strategy, [&](TensorSource tensors) -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(weights, CopyTensors(strategy, tensors, copies));
    return absl::OkStatus();
  }));  // the same on all ranks
  parallel::OptimizerWriter optimizer;
  if (strategy.model().num_trainable_parameters() > 0) {
    absl::StatusOr<parallel::OptimizerWriter> copied = strategy.CopyOptimizer(copies);
    absl::Status status = copied.status();
    if (status.ok()) status = copies.Finish();
    TANDEM_RETURN_IF_ERROR(ranks::Agree(ranks, status));
    optimizer = *std::move(copied);
  }
  CompanionWriter companion;
  if (source.companion != nullptr) {
    const auto copy = [&]() -> absl::Status {
      TANDEM_ASSIGN_OR_RETURN(companion, source.companion->Copy(copies));
      return copies.Finish();
    };
    TANDEM_RETURN_IF_ERROR(
        OnRankZero(ranks, [&] { return CatchTorchErrors("copy of the companion", copy); }));
  }
  return [rank = ranks.rank(), steps = OptimizerSteps(source), state = source.state, files,
          weights = std::move(weights), optimizer = std::move(optimizer),
          companion = std::move(companion)](const std::string& directory) -> absl::Status {
    TANDEM_RETURN_IF_ERROR(files.Write(directory, SourceOf(weights)));
    if (optimizer) TANDEM_RETURN_IF_ERROR(optimizer(directory));
    if (companion) TANDEM_RETURN_IF_ERROR(companion(directory));
    return rank == 0 ? WriteState(directory, steps, state) : absl::OkStatus();
  };
}

// Returns what writes the state as it is then. Collective.
WriteFiles LiveState(const SaveSource& source) {
  return [source](const std::string& directory) -> absl::Status {
    parallel::Strategy& strategy = source.strategy;
    ranks::Communicator& ranks = *strategy.ranks().patient();
    TANDEM_RETURN_IF_ERROR(WeightFiles::OfCheckpoint(strategy).Save(strategy, directory));
    if (strategy.model().num_trainable_parameters() > 0) {
      TANDEM_RETURN_IF_ERROR(ranks::Agree(ranks, strategy.SaveOptimizer(directory)));
    }
    if (ranks.rank() != 0) return absl::OkStatus();
    if (source.companion != nullptr) {
      TANDEM_RETURN_IF_ERROR(source.companion->Save(directory));
    }
    return WriteState(directory, OptimizerSteps(source), source.state);
  };
}

}  // namespace

absl::StatusOr<StartedSave> StartSave(const ConfinedPath& directory, const std::string& name,
                                      int64_t keep, const SaveSource& source, TensorCopies* copies,
                                      const std::vector<std::string>& in_use) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("keep", keep, 0));
  TANDEM_RETURN_IF_ERROR(CheckGiven("directory", directory.path));
  TANDEM_RETURN_IF_ERROR(checkpoint::CheckName(name));
  std::optional<ConfinedFolder> folder;  // outlives the pending checkpoint
  StartedSave save;
  save.path_ = fs::path(directory.path) / name;
  save.directory_ = directory;
  save.identity_ = {.kind = source.state.kind,
                    .step = source.state.version,
                    .run_id = std::string(source.state.ledger.newest_run_id())};
  save.keep_ = keep;
  save.in_use_ = in_use;
  ranks::Communicator& ranks = *source.strategy.ranks().patient();
  TANDEM_RETURN_IF_ERROR(
      EnterOnAllRanks(ranks, "directory", directory, ConfinedFolder::Missing::kIsCreated, folder));
  TANDEM_ASSIGN_OR_RETURN(
      save.target_, ranks::FromRankZero<std::string>(ranks, [&]() -> absl::StatusOr<std::string> {
        TANDEM_ASSIGN_OR_RETURN(
            checkpoint::PendingCheckpoint begun,
            checkpoint::PendingCheckpoint::Begin(directory.path, name, save.identity_));
        return save.pending_.emplace(std::move(begun)).directory();
      }));
  if (copies != nullptr) {
    TANDEM_ASSIGN_OR_RETURN(save.write_, CopyState(source, *copies));
  } else {
    save.write_ = LiveState(source);
  }
  return save;
}

absl::StatusOr<checkpoint::Saved> StartedSave::Finish(ranks::Communicator& ranks) && {
  std::optional<ConfinedFolder> folder;  // outlives the pending checkpoint
  std::optional<checkpoint::PendingCheckpoint> pending = std::exchange(pending_, std::nullopt);
  TANDEM_RETURN_IF_ERROR(
      EnterOnAllRanks(ranks, "directory", directory_, ConfinedFolder::Missing::kIsError, folder));
  // Every rank writes its files, with their digests, and syncs them. Then all meet.
  WrittenFiles written;
  const absl::Status status = CatchTorchErrors("checkpoint", [&] { return write_(target_); });
  write_ = nullptr;  // with the copies
  TANDEM_RETURN_IF_ERROR(ranks::Agree(ranks, status));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<WrittenFile> files,
                          FilesOfAllRanks(ranks, written.Take()));
  return ranks::FromRankZero<checkpoint::Saved>(ranks, [&]() -> absl::StatusOr<checkpoint::Saved> {
    TANDEM_ASSIGN_OR_RETURN(const checkpoint::Saved committed, (*std::move(pending)).Commit(files));
    TANDEM_RETURN_IF_ERROR(checkpoint::Prune(committed.path, identity_, keep_, in_use_));
    return committed;
  });
}

absl::StatusOr<TrainingCheckpoint> ReadTraining(const ConfinedPath& path,
                                                parallel::Strategy& strategy,
                                                const std::string& kind) {
  ranks::Communicator& ranks = *strategy.ranks().patient();
  // Rank 0 alone: it may put a checkpoint back that a crash has left aside.
  TANDEM_RETURN_IF_ERROR(OnRankZero(ranks, [&]() -> absl::Status {
    const absl::StatusOr<ConfinedFolder> parent =
        ConfinedFolder::Enter(path.parent(), ConfinedFolder::Missing::kIsError);
    return parent.ok() ? checkpoint::RecoverDirectory(path.path) : absl::OkStatus();
  }));
  TrainingCheckpoint read;
  const absl::Status status = CatchTorchErrors("checkpoint", [&]() -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(ConfinedFolder folder, checkpoint::OpenToVerify(path));
    read.folder = std::make_shared<ConfinedFolder>(std::move(folder));
    TANDEM_RETURN_IF_ERROR(checkpoint::VerifyShare(path.path, ranks.rank(), ranks.size()));
    TANDEM_ASSIGN_OR_RETURN(read.state, ReadState(path.path, kind));
    TANDEM_ASSIGN_OR_RETURN(read.weights, ReadWeights(path.path, strategy));
    return absl::OkStatus();
  });
  TANDEM_RETURN_IF_ERROR(ranks::Agree(ranks, status));
  return read;
}

absl::Status ExportModel(parallel::Strategy& strategy, const ConfinedPath& path, DType dtype) {
  TANDEM_RETURN_IF_ERROR(CheckPath("path", path.path));
  std::error_code error;
  fs::path target = fs::absolute(path.path, error).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "model/" is "model"
  const ConfinedPath parent = ConfinedPath(target.string(), path.root).parent();
  ranks::Communicator& ranks = *strategy.ranks().patient();
  std::optional<ConfinedFolder> folder;
  std::optional<checkpoint::TemporaryDirectory> temporary;  // on rank 0 alone
  const auto create = [&]() -> absl::StatusOr<std::string> {
    TANDEM_ASSIGN_OR_RETURN(
        checkpoint::TemporaryDirectory created,
        checkpoint::TemporaryDirectory::Create(parent.path, target.filename().string()));
    return temporary.emplace(std::move(created)).path();
  };
  TANDEM_RETURN_IF_ERROR(
      EnterOnAllRanks(ranks, "path", parent, ConfinedFolder::Missing::kIsCreated, folder));
  TANDEM_ASSIGN_OR_RETURN(
      const std::string directory,
      ranks::FromRankZero<std::string>(ranks, [&]() -> absl::StatusOr<std::string> {
        if (fs::exists(fs::symlink_status(SystemPath(target.string()), error))) {
          return FieldError(absl::StatusCode::kAlreadyExists, "path",
                            absl::StrCat(path.path, " exists"));
        }
        absl::StatusOr<std::string> created = create();
        return created.ok() ? created : PrependFieldPath("path", created.status());
      }));
  absl::Status status = WeightFiles::OfModel(strategy, dtype).Save(strategy, directory);
  if (status.ok()) {
    status = OnRankZero(ranks, [&] { return RenameDurably(directory, target.string()); });
  }
  return PrependFieldPath("path", status);
}

}  // namespace tandem::training
