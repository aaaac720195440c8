#include "common/speculator/adapters/speculator_adapter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"
#include "common/speculator/adapters/arctic_lstm_adapter.h"
#include "common/speculator/adapters/mlp_adapter.h"
#include "common/speculator/heads/arctic_lstm_speculator.h"
#include "common/speculator/heads/mlp_speculator.h"
#include "common/speculator/speculator_files.h"

namespace tandem::speculator {
namespace {

using nlohmann::json;

// Keys of config.json that change the arithmetic, and no shape.
constexpr const char* kKeysWithoutShape[] = {"n_predict", "method", "tie_weights", "tie_lstm_embs",
                                             "scale_input"};

struct Entry {
  const SpeculatorKind* kind;
  SpeculatorAdapterFactory make;
};

std::vector<Entry>& Entries() {
  static auto* const entries = new std::vector<Entry>{
      {&MlpSpeculatorKind(), MakeMlpAdapter}, {&ArcticLstmSpeculatorKind(), MakeArcticLstmAdapter}};
  return *entries;
}

absl::Status CheckFits(const Speculator& speculator, const SpeculatorKind& kind,
                       const BaseModelSizes& base) {
  const SpeculatorSizes& sizes = speculator.sizes();
  if (speculator.kind().name != kind.name) {
    return InvalidField("path", absl::StrCat("holds a speculator of the kind ",
                                             speculator.kind().name, ", not ", kind.name));
  }
  if (sizes.hidden_size != base.hidden_size) {
    return InvalidField("path",
                        absl::StrCat("the speculator is for a hidden size of ", sizes.hidden_size,
                                     ", the model has ", base.hidden_size));
  }
  return absl::OkStatus();
}

// Checks that `read` may replace `attached`.
absl::Status CheckSame(const std::string& directory, const Speculator& attached,
                       const Speculator& read) {
  const auto differs = [&](absl::string_view what) {
    return InvalidField(
        "path", absl::StrCat(directory, " holds a different speculator: ", what, " differs"));
  };
  if (read.kind().name != attached.kind().name) return differs("its kind");
  for (const char* key : kKeysWithoutShape) {
    if (read.config().value(key, json()) != attached.config().value(key, json())) {
      return differs(absl::StrCat("'", key, "' of config.json"));
    }
  }
  const auto& ours = attached.parameters();
  const auto& theirs = read.parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    if (i >= theirs.size() || theirs[i].spec.name != ours[i].spec.name ||
        theirs[i].spec.shape != ours[i].spec.shape) {
      return differs(absl::StrCat("tensor '", ours[i].spec.name, "'"));
    }
  }
  return theirs.size() == ours.size() ? absl::OkStatus() : differs("the number of tensors");
}

absl::Status CheckFinite(const std::string& directory, const Speculator& speculator) {
  for (const SpeculatorParameter& parameter : speculator.parameters()) {
    if (at::isfinite(parameter.value).all().item<bool>()) continue;
    return absl::DataLossError(absl::StrCat(directory, ": tensor '", parameter.spec.name,
                                            "' holds a number that is not finite"));
  }
  return absl::OkStatus();
}

std::string FolderIn(const std::string& directory) {
  return (std::filesystem::path(directory) / kCheckpointFolder).string();
}

absl::Status CheckNothingBesidePath(const SpeculatorSettings& settings) {
  for (const auto& [name, is_set] :
       {std::pair{"seed", settings.seed != 0}, std::pair{"n_predict", settings.n_predict != 0},
        std::pair{"inner_dim", settings.inner_dim != 0},
        std::pair{"emb_dim", settings.emb_dim != 0}, std::pair{"proj_dim", settings.proj_dim != 0},
        std::pair{"method", !settings.method.empty()},
        std::pair{"tie_weights", settings.tie_weights},
        std::pair{"tie_lstm_embs", settings.tie_lstm_embs},
        std::pair{"scale_input", settings.scale_input}}) {
    if (is_set)
      return InvalidField(name, "must not be set together with path, whose config.json has it");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RefuseSetting(absl::string_view name, bool is_set, const SpeculatorKind& kind) {
  if (!is_set) return absl::OkStatus();
  return InvalidField(name, absl::StrCat("the adapter ", kind.name, " has no such setting"));
}

absl::Status SpeculatorAdapter::BuildAndAttach(const SpeculatorSettings& settings,
                                               const BaseModelSizes& base, at::Device device) {
  TANDEM_ASSIGN_OR_RETURN(
      speculator_,
      Read(settings, base,
           {.num_token_ids = base.num_token_ids, .requires_grad = true, .device = device}));
  settings_ = settings;
  base_ = base;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Speculator>> SpeculatorAdapter::Read(
    const SpeculatorSettings& settings, const BaseModelSizes& base,
    const SpeculatorOptions& options) const {
  if (settings.path.empty()) {
    TANDEM_ASSIGN_OR_RETURN(const json config, Config(settings, base));
    return RandomSpeculator(kind(), ConfigFields(config, ""), settings.seed, options);
  }
  TANDEM_RETURN_IF_ERROR(CheckNothingBesidePath(settings));
  auto loaded = LoadSpeculator(settings.path, options);
  if (!loaded.ok()) return PrependFieldPath("path", loaded.status());
  TANDEM_RETURN_IF_ERROR(CheckFits(**loaded, kind(), base));
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("path", CheckFinite(settings.path, **loaded)));
  return loaded;
}

absl::StatusOr<std::unique_ptr<Speculator>> SpeculatorAdapter::Declare(
    const SpeculatorSettings& settings, const BaseModelSizes& base) const {
  const SpeculatorOptions options = {.num_token_ids = base.num_token_ids};
  if (!settings.path.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckNothingBesidePath(settings));
    auto declared = DeclareSpeculator(settings.path, options);
    if (!declared.ok()) return PrependFieldPath("path", declared.status());
    TANDEM_RETURN_IF_ERROR(CheckFits(**declared, kind(), base));
    return declared;
  }
  TANDEM_ASSIGN_OR_RETURN(const json config, Config(settings, base));
  return kind().create(ConfigFields(config, ""), options);
}

absl::StatusOr<SpeculatorLossReport> SpeculatorAdapter::ComputeSpeculatorLoss(
    const SpeculatorBatch& batch, const SpeculatorLossOptions& options) const {
  SpeculatorBatch detached = batch;
  detached.hidden = batch.hidden.detach();
  return SpeculatorLoss(*speculator_, options).ForwardBackward(detached);
}

absl::Status SpeculatorAdapter::SaveCheckpoint(const std::string& directory) const {
  return SaveSpeculator(*speculator_, FolderIn(directory));
}

absl::StatusOr<std::function<absl::Status(const std::string& directory)>>
SpeculatorAdapter::CopyCheckpoint(TensorCopies& copies) const {
  SpeculatorFiles files = FilesOf(*speculator_);
  at::Tensor last, copy;  // the names of a tied tensor follow each other
  for (auto& [name, tensor] : files.tensors) {
    if (!tensor.is_same(last)) {
      last = tensor;
      TANDEM_ASSIGN_OR_RETURN(copy, copies.Add(tensor));
    }
    tensor = copy;
  }
  return [files = std::move(files)](const std::string& directory) {
    return SaveSpeculator(files, FolderIn(directory));
  };
}

absl::StatusOr<std::unique_ptr<Speculator>> SpeculatorAdapter::ReadCheckpoint(
    const std::string& directory) const {
  const std::string folder = FolderIn(directory);
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) {
    return absl::NotFoundError(absl::StrCat(folder, " is missing"));
  }
  auto read = LoadSpeculator(folder, {.num_token_ids = base_.num_token_ids});
  // A config.json that a checkpoint lacks is a broken checkpoint, not one without a speculator.
  if (absl::IsNotFound(read.status())) return absl::DataLossError(read.status().message());
  if (!read.ok()) return PrependFieldPath("path", read.status());
  TANDEM_RETURN_IF_ERROR(CheckSame(folder, *speculator_, **read));
  TANDEM_RETURN_IF_ERROR(CheckFinite(folder, **read));
  return read;
}

absl::StatusOr<std::unique_ptr<Speculator>> SpeculatorAdapter::ReadInitial() const {
  TANDEM_ASSIGN_OR_RETURN(auto read,
                          Read(settings_, base_, {.num_token_ids = base_.num_token_ids}));
  TANDEM_RETURN_IF_ERROR(CheckSame(settings_.path, *speculator_, *read));
  return read;
}

void SpeculatorAdapter::Adopt(const Speculator& other) {
  const at::NoGradGuard no_grad;
  at::Tensor buffer = speculator_->buffer();
  buffer.copy_(other.buffer());
}

absl::Status SpeculatorAdapter::LoadCheckpoint(const std::string& directory) {
  TANDEM_ASSIGN_OR_RETURN(const auto read, ReadCheckpoint(directory));
  Adopt(*read);
  return absl::OkStatus();
}

bool RegisterSpeculatorAdapter(const SpeculatorKind& kind, SpeculatorAdapterFactory factory) {
  RegisterSpeculatorKind(kind);
  Entries().push_back({&kind, factory});
  return true;
}

absl::StatusOr<std::unique_ptr<SpeculatorAdapter>> MakeSpeculatorAdapter(absl::string_view name,
                                                                         absl::string_view field) {
  std::string known;
  for (const Entry& entry : Entries()) {
    if (name == absl::string_view(entry.kind->name)) return entry.make();
    absl::StrAppend(&known, known.empty() ? "" : ", ", entry.kind->name);
  }
  return FieldError(absl::StatusCode::kUnimplemented, field,
                    absl::StrCat("'", name, "' is not supported (", known, " are)"));
}

absl::StatusOr<int64_t> CountSpeculatorValues(const SpeculatorSettings& settings,
                                              const BaseModelSizes& base) {
  TANDEM_ASSIGN_OR_RETURN(const auto adapter, MakeSpeculatorAdapter(settings.adapter, "adapter"));
  TANDEM_ASSIGN_OR_RETURN(const auto declared, adapter->Declare(settings, base));
  return declared->buffer().numel();
}

}  // namespace tandem::speculator
