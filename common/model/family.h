// A model family: everything in which one `model_type` of Hugging Face differs from another. The
// rest of the code asks the family and never looks at `model_type` itself. No torch: the memory
// plan and the checks of a configuration read a family before any tensor exists.
//
// To add one, follow "Add a model family" in docs/internals/architecture.md.
#ifndef TANDEM_COMMON_MODEL_FAMILY_H_
#define TANDEM_COMMON_MODEL_FAMILY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config/model_config.h"
#include "common/model/config/parameter_spec.h"
#include "common/model/passes/layer_cache.h"

namespace tandem {

class ConfigFields;
struct ConfigSection;

// A size of config.json and the axis of a tensor in the weight files that must have it.
struct WeightFileSize {
  std::string tensor;
  size_t axis = 0;
  int64_t size = 0;
  std::string field;        // of config.json
  std::string factor = "";  // what the field is multiplied by: "times head_dim "
  size_t dimensions = 2;    // of the tensor
  // The tensors that other files have in its place.
  std::vector<WeightFileSize> instead = {};
};

// A parameter [rows, columns] in a stacked tensor.
struct StackedParameter {
  std::string name;
  int64_t rows = 0;
};

// A tensor in which weight files may hold several parameters, the rows of one after those of the
// other.
struct StackedTensor {
  std::string name;
  std::vector<int64_t> shape;  // its last axis has the columns
  std::vector<StackedParameter> parameters;
  // Whether files must have it in the place of its parameters, and exports do.
  bool is_exported = false;
};

class Family {
 public:
  // `classifier_prefix` is nullptr where classifiers begin with `class_prefix` too.
  Family(std::string model_type, std::string class_prefix, bool has_token_classifier,
         const char* classifier_prefix = nullptr)
      : model_type_(std::move(model_type)),
        class_prefix_(std::move(class_prefix)),
        classifier_prefix_(classifier_prefix == nullptr ? class_prefix_ : classifier_prefix),
        has_token_classifier_(has_token_classifier) {}
  virtual ~Family() = default;

  const std::string& model_type() const { return model_type_; }
  // "Llama": the prefix of the classes of `transformers`.
  const std::string& class_prefix() const { return class_prefix_; }
  // The class of exported language models.
  virtual std::string language_model_class() const { return class_prefix_ + "ForCausalLM"; }
  // The prefix of the classes as which critics are exported: "Gemma3Text".
  const std::string& classifier_prefix() const { return classifier_prefix_; }
  // Whether `transformers` has <classifier prefix>ForTokenClassification, as which critics are
  // exported; else they are its sequence classifiers.
  bool has_token_classifier() const { return has_token_classifier_; }

  // The tables of keys through which ReadConfig reads config.json.
  virtual std::vector<ConfigSection> Keys() const = 0;
  // Reads the architecture, and the ids that end a response, from config.json into `config`.
  // INVALID_ARGUMENT with the field's path for a key that is missing or wrong, UNIMPLEMENTED for
  // one that would change the numbers and that the backbone does not compute.
  virtual absl::Status ReadConfig(const ConfigFields& fields, ModelConfig& config) const = 0;

  // The parameters of the backbone (no head) under their Hugging Face names, block by block; how
  // each is cut into tensor-parallel shards is ParameterSpec::shard_axis.
  virtual std::vector<ParameterSpec> Parameters(const ModelConfig& config) const = 0;
  // The parameter that a tensor of a weight file is, where files call it otherwise.
  virtual std::string ParameterName(absl::string_view tensor) const { return std::string(tensor); }
  // The sizes of `config` that the weight files must confirm before memory is planned for them.
  virtual std::vector<WeightFileSize> WeightFileSizes(const ModelConfig& config) const = 0;

  // The tensors that files have in the place of parameters.
  virtual std::vector<StackedTensor> StackedTensors(const ModelConfig& /*config*/) const {
    return {};
  }

  // Whether the model can be cut into `shard_count` tensor-parallel shards, with or without its
  // experts (ExpertShard::whole). The count need not divide the vocabulary, but every shard must
  // have a row of it. INVALID_ARGUMENT names `field`, the setting that gave the count, and the size
  // that does not fit; UNIMPLEMENTED for an architecture that the backbone does not shard.
  virtual absl::Status CheckShards(const ModelConfig& config, int64_t shard_count,
                                   bool whole_experts, absl::string_view field) const = 0;
  // Whether the experts of each layer can be divided among `shard_count` ranks (ExpertShard).
  // INVALID_ARGUMENT names `field`, the setting that gave the count, and the number that it does
  // not divide, or says that the model has no experts.
  virtual absl::Status CheckExpertShards(const ModelConfig& config, int64_t shard_count,
                                         absl::string_view field) const = 0;

  // Returns what each layer caches and reads, in one of `shard_count` shards.
  virtual std::vector<LayerCache> CacheLayout(const ModelConfig& config,
                                              int64_t shard_count) const = 0;
  // Upper estimate of the values per token that are alive at the widest point of a forward pass
  // without autograd, in one of `shard_count` shards. With `whole_experts` a shard may compute all
  // experts of a token.
  virtual int64_t InferenceActivations(const ModelConfig& config, int64_t shard_count,
                                       bool whole_experts) const = 0;
  // Upper estimate of the bytes per token that autograd keeps of one layer, in one of `shard_count`
  // shards.
  virtual int64_t TrainingActivationBytes(const ModelConfig& config, int64_t layer,
                                          int64_t shard_count) const = 0;

  // Whether a tensor of the weight files belongs to a part of the model that the backbone does not
  // have, and that an export must still contain as it was.
  virtual bool KeepsTensor(const ModelConfig& config, absl::string_view name) const = 0;

 private:
  const std::string model_type_;
  const std::string class_prefix_;
  const std::string classifier_prefix_;
  const bool has_token_classifier_;
};

// All families, in the order in which errors list them.
const std::vector<const Family*>& Families();

// UNIMPLEMENTED for "config.json.model_type", with the list of families that are there.
absl::StatusOr<const Family*> FindFamily(absl::string_view model_type);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILY_H_
