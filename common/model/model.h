// A language model or a critic: weights from a Hugging Face directory, a forward over ragged
// batches, for training (autograd) and for rollout (KV cache).
//
//   TANDEM_ASSIGN_OR_RETURN(auto model, Model::Load(directory, {.requires_grad = true}));
//   CausalContext causal;
//   at::Tensor hidden = model->HiddenStates(MakeRaggedBatch({{1, 2, 3}}), causal);  // [3, H]
//   at::Tensor logits = model->ForwardLogits(hidden);                               // [3, V]
//
// V is the number of token ids. The embedding and the head may have more rows: Qwen2.5's models pad
// one tokenizer to 151,936 or to 152,064 rows. No token has the id of such a padding row, and it
// gets no logit: it has probability zero, and no gradient.
//
// A model lives on one device. What trains is stored in float32 and may compute in another type;
// what only infers is stored in the type that it computes in, or its matrices are packed
// (Placement::weight_format) and it computes in float32. With Placement::weight_dtype both compute
// with the values that packed bfloat16 matrices have, to the bit. Functions that return tensors may
// throw c10::Error as libtorch does; engines turn that into a Status at their edge.
//
// With Placement::shard_group every rank holds a shard and makes the same calls on the same batch;
// hidden states and values are the same on every rank. In the backward pass every rank brings the
// whole gradient of the values, but only its own summand of the gradient of the hidden states: the
// contribution of its rows of a vocabulary-parallel head
// (common/loss/logits/linear_cross_entropy.h). Then the gradients of parameters with a shard axis
// are whole on the rank that holds the shard; those of all others (norms, biases of maps sharded by
// input, the value head) are summands, to be added up over the group before they are used.
#ifndef TANDEM_COMMON_MODEL_MODEL_H_
#define TANDEM_COMMON_MODEL_MODEL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config/lora.h"
#include "common/model/config/model_config.h"
#include "common/model/model_summary.h"
#include "common/model/parameters/parameter.h"
#include "common/model/passes/attention_context.h"
#include "common/model/passes/backbone.h"
#include "common/model/passes/decode_buffers.h"
#include "common/model/passes/decode_input.h"
#include "common/model/passes/kv_cache.h"
#include "common/model/passes/layer_cache.h"
#include "common/model/passes/ragged_batch.h"
#include "common/model/vision/image_batch.h"
#include "common/ops/linear/linear_weight.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/dtype.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/word_sums.h"

namespace tandem {

class Family;
class ParameterStore;
class PreparedWeights;
struct StackedTensor;
struct TensorView;

// The source of a value head's weights.
enum class ValueHeadSource {
  kNone,        // the model has no value head
  kCheckpoint,  // the file held one
  kRandom,      // the file held none: drawn from N(0, initializer_range) with `value_head_seed`
};

struct LoadOptions {
  HeadKind head = HeadKind::kLm;
  // kValue on a base checkpoint whose embeddings are tied is INVALID_ARGUMENT unless this is set.
  bool untie_embeddings = false;
  uint64_t value_head_seed = 0;
  // Number of token ids, which the tokenizer says (Vocabulary::size); 0: the vocab_size of
  // config.json, which counts padding rows too. The model has no more ids than that: those of a
  // tokenizer beyond it have no embedding, and are never sampled and refused in prompts.
  int64_t num_token_ids = 0;
  // Parameters are float32 leaves that require gradients, but for the frozen ones.
  bool requires_grad = false;
  // Patterns of the names that do not train (common/model/config/freeze.h).
  std::vector<std::string> freeze = {};
  // Freezes every parameter of a model that would otherwise train: float32 values, digests and
  // passes are those of a model in training. `freeze` must be empty.
  bool freeze_all = false;
  // Low-rank adapters of linear maps. Of a model that trains, they and the value head are all that
  // does; `freeze` must be empty.
  LoraOptions lora = {};
  Placement placement = {};
  // Set by a process that does not keep the whole of every block: the parameters are declared, and
  // neither read from the files nor given memory. The caller reads what it keeps (ReadSource), and
  // gives a block memory while it runs.
  bool without_memory = false;
  // Computes Model::weights_digest, which reads every value of the files. A rank of several that
  // holds a part leaves it out: the ranks add the digest up (parallel::ParametersDigest).
  bool computes_digest = true;
};

// Whole parameters in the mapped memory of their files.
struct SourceParameters {
  std::shared_ptr<const void> files;  // the tensors live as long as this
  NamedTensors tensors;               // in the files' types, in the order of Model::Parameters

  std::string Mark() const;  // as Model::source_mark
};

class Model {
 public:
  // Loads a model. INVALID_ARGUMENT that names the field of config.json whose size is not that of
  // the weights, "tokenizer.json" for more token ids than config.json has rows, or file and tensor
  // when one is missing, unexpected, mis-shaped, or not floating-point, or "freeze" or "placement"
  // when they do not fit (for shards: a number of heads, say, that does not divide); DATA_LOSS and
  // INVALID_ARGUMENT for broken files; NOT_FOUND; UNIMPLEMENTED for a model_type or feature that is
  // not supported.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& directory,
                                                     const LoadOptions& options = {});
  // Returns a model with weights as `transformers` initialises them (norms 1, biases 0, rest
  // N(0, initializer_range)), drawn from `seed`. For tests and benchmarks.
  static absl::StatusOr<std::unique_ptr<Model>> Random(const ModelConfig& config, uint64_t seed,
                                                       const LoadOptions& options = {});
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  // The adapters, with the settings of the files that they were read from.
  const LoraOptions& lora() const { return lora_; }
  // V: ids of prompts, labels and samples are below it.
  int64_t num_token_ids() const { return num_token_ids_; }
  HeadKind head() const { return head_; }
  ValueHeadSource value_head_source() const { return value_head_source_; }
  // Whether the head shares the embedding's matrix.
  bool tied() const { return tied_; }
  at::Device device() const { return placement_.device; }
  // The type of the computation, and so of hidden states and logits.
  at::ScalarType dtype() const { return placement_.dtype; }
  // The type whose values the matrices have in passes (Placement::weight_dtype).
  at::ScalarType weight_dtype() const { return placement_.weight_dtype; }
  kernels::WeightFormat weight_format() const { return placement_.weight_format; }
  // Whether a parameter is stored packed, in this process or in another one.
  bool IsPacked(const tandem::Parameter& parameter) const {
    return parameter.IsPackedIn(weight_format());
  }
  // The type that linear maps round their inputs to (Placement::activation_dtype).
  at::ScalarType activation_dtype() const { return placement_.activation_dtype; }
  int64_t shard_count() const { return placement_.shard_count; }
  // WeightsDigest (common/weights/weights_digest.h) of the values in the files that were loaded,
  // whatever type and shard of them is stored here. Empty without LoadOptions::computes_digest.
  const std::string& weights_digest() const { return weights_digest_; }
  // The same of the model without its adapters.
  const std::string& base_digest() const { return base_digest_; }
  // The sums behind weights_digest of the parameters that no update of weights brings (IsSent).
  const TensorSums& kept_sums() const { return kept_sums_; }
  // A digest of the beginning of every tensor in the files that were loaded. It tells two models
  // apart, and not every change. Empty for a model that was not loaded.
  const std::string& source_mark() const { return source_mark_; }

  // [T, H]: the hidden states after the final norm, which the fused loss and the heads consume.
  // The batch is on the model's device. A shard without its group cannot compute:
  // c10::NotImplementedError.
  at::Tensor HiddenStates(const RaggedBatch& batch, AttentionContext& context) const;
  // The same block by block (Backbone), for a process that runs or holds only some blocks. `batch`
  // and `context` must outlive the pass.
  ModelPass StartPass(const RaggedBatch& batch, AttentionContext& context) const;
  int64_t num_blocks() const { return backbone_->num_blocks(); }
  at::Tensor RunBlock(int64_t block, const at::Tensor& hidden, const ModelPass& pass) const {
    return backbone_->RunBlock(block, hidden, pass);
  }
  // [N, H] -> [N, V], the logits of all token ids, after the soft cap of a model that has one.
  // Needs kLm. Ranks of a sharded model bring the logits of their rows, and each gets all; with
  // autograd that is c10::NotImplementedError.
  at::Tensor ForwardLogits(const at::Tensor& hidden) const;
  // [N, H] -> [N]. Needs kValue and the last block.
  at::Tensor Values(const at::Tensor& hidden) const;
  // Needs kLm and the last block. [rows, H] in the type of the computation, or in bf16 for hidden
  // states that the head rounds: the rows of the head
  // that this process holds, padding rows included. A fused output loss multiplies by those of
  // token ids and adds to the gradient of the parameter `lm_head_name()`, the embedding when tied.
  ops::MatrixRows head_rows() const { return head_weight_->rows(); }
  // Needs the whole head. [V, H]: the rows of token ids.
  ops::MatrixRows output_weight() const { return head_rows().Narrow(0, num_token_ids_); }
  // The soft cap of the logits (ops::SoftCap), which a fused output loss must compute, too.
  std::optional<double> logit_soft_cap() const { return config_.decoder.logit_soft_cap; }
  std::string lm_head_name() const { return tied_ ? kEmbeddingName : kLmHeadName; }

  // Consumes every input's tokens in one ragged pass, and writes their keys and values into the
  // cache. Returns the wanted rows, inputs one after the other: [number of output rows, H], after
  // the final norm; feed them to ForwardLogits. image_rows[i] has what ImageRows returned of each
  // image of input i, and may be empty where no input has images. With `drawn` [N] float64, on the
  // model's device, tokens of the inputs are indices of the tokens that it has. Run it under
  // c10::InferenceMode. A row's numbers do not depend on what it was batched with nor on how the
  // tokens before it were chunked. Of a shard, the cache holds its heads; all ranks get the same
  // bits, and the same error. UNIMPLEMENTED for a shard without the others. INVALID_ARGUMENT for a
  // block that the cache does not have, too few blocks, no tokens, an id that no token has, or rows
  // out of order. On an error the cache has not changed.
  absl::StatusOr<at::Tensor> Decode(KvCache& cache, std::span<const DecodeInput> inputs,
                                    std::span<const std::vector<at::Tensor>> image_rows = {},
                                    const at::Tensor& drawn = {}) const;
  // The errors of Decode for its inputs.
  absl::Status CheckInputs(const KvCache& cache, std::span<const DecodeInput> inputs,
                           const at::Tensor& drawn = {}) const;
  // Decode of a batch that lies on the device: the wanted rows [R, H]. All layers attend in the
  // kernel (AttendsInKernel), and no rank has a shard.
  at::Tensor DecodeBatched(KvCache& cache, const DecodeBatch& batch) const;
  // Whether the model's layers attend to a cache of this type in the project's kernel.
  bool AttendsInKernel(at::ScalarType cache_type) const;
  // Makes what the backbone keeps of positions for all below `end`, so that it stays where it is.
  void ReservePositions(int64_t end) const { backbone_->ReservePositions(end); }

  // Returns the hidden states [rows, H] that the vision tower gives the tokens of an image. They
  // depend on the weights. Throws c10::Error if the model has no tower.
  at::Tensor ImageRows(const VisionInput& input) const {
    return backbone_->ImageRows(PixelValues(input).to(device()), {input.shape.grid});
  }

  // The cached keys and values of each layer: the argument of a KvCache for Decode.
  std::vector<LayerCache> CacheLayout() const;

  // Returns all parameters that this process holds, by Hugging Face name, in a fixed order; a tied
  // head is listed once, as the embedding. Those that train require gradients. They share storage
  // with the model: after an in-place change OnWeightsChanged() must be called before the next
  // forward. Throws c10::Error for a model with packed weights, whose matrices are no tensors: see
  // Parameter::ComputedValue.
  NamedTensors Parameters() const;
  void OnWeightsChanged();
  // The memory of the parameters, by block of a pass: flat, each parameter a view of that of its
  // Parameter::buffer. Empty for a block that is not held. The buffers of a block are num_blocks()
  // apart: that of its parameters, where experts are sharded that of its experts, and where there
  // are adapters as many again for these.
  const std::vector<at::Tensor>& BlockBuffers() const;
  // Buffers of the same layout for copies in the type of the computation, which linear maps
  // multiply with: with LoadOptions::without_memory and another type than float32, else empty. They
  // have no memory; the caller gives them memory and fills them before a block runs.
  const std::vector<at::Tensor>& ComputeBuffers() const;
  // Whether a buffer has sharded experts, and so is that of other ranks than its block's others.
  bool HasExperts(int64_t buffer) const;
  // Returns the parameters of the whole model, held by this process or not.
  const std::vector<tandem::Parameter>& DeclaredParameters() const;
  // Whether an update of weights brings a parameter: of a model with adapters only these.
  bool IsSent(const ParameterSpec& spec) const { return !lora_.enabled() || spec.adapts; }
  // Returns the specs of those parameters as float32 tensors.
  std::vector<WeightSpec> SentSpecs() const;
  // Returns the tensors in which weight files of the model hold several parameters.
  std::vector<StackedTensor> StackedTensors() const;
  // The parameter of that name; undefined if this process has none, or has it packed.
  at::Tensor Parameter(absl::string_view name) const;
  int64_t num_parameters() const;
  int64_t num_adapter_parameters() const;
  int64_t num_trainable_parameters() const;
  // Describes the model as servers report it; `max_model_len` is the engine's. The caller adds the
  // digest of the vocabulary, which a model does not know.
  ModelSummary Summary(int64_t max_model_len) const;

  // Copies values in, by name, from any device and floating type; of whole tensors, a sharded model
  // takes its shard. All or nothing: names, shapes and completeness are checked before the first
  // copy. A tied model takes an "lm_head.weight" that equals its embedding. INVALID_ARGUMENT names
  // the tensor.
  absl::Status LoadParameters(const NamedTensors& tensors);
  // The checks of LoadParameters alone. Returns the tensors that it would copy, each with its
  // parameter, which this process need not hold.
  absl::StatusOr<std::vector<std::pair<const tandem::Parameter*, at::Tensor>>> Match(
      const NamedTensors& tensors) const;

  // Makes room for new weights of a model that infers, beside those that serve. Runs beside passes,
  // on any thread. The model must outlive the result.
  std::unique_ptr<PreparedWeights> PrepareWeights() const;
  // Puts complete weights in force, between two passes: memory changes hands, no value is read or
  // copied. `prepared` has the former weights then, and is only good to be destroyed.
  void Adopt(PreparedWeights& prepared);

  // Reads again what Load read, without copying it into the model. A caller that wants exactly what
  // was loaded compares the mark, and then the digest. Errors as Load.
  absl::StatusOr<SourceParameters> ReadSource() const;

  // Whether SaveAdapters writes a parameter.
  bool IsInAdapterFile(const tandem::Parameter& parameter) const {
    return parameter.spec.adapts || parameter.trainable;
  }
  // Writes the adapters and the value head as a directory that PEFT loads, on top of the model that
  // was loaded; `parameters` gives whole parameters, of which the others are not read.
  absl::Status SaveAdapters(const std::string& directory, TensorSource parameters) const;
  // Writes a Hugging Face directory that `transformers` loads, with the adapters merged in float32
  // into the weights: config.json with the keys it was
  // read with, model.safetensors in `dtype`, and the tokenizer's files if the source directory
  // still has them: FAILED_PRECONDITION if tokenizer.json is gone from there though the number of
  // token ids, which it says, is not vocab_size, or if tensors that an export keeps as they were
  // (Family::KeepsTensor) are gone. A critic is written as
  // <Family>ForTokenClassification with `score.weight`; where `transformers` has no such class, as
  // <Family>ForSequenceClassification. `parameters` gives whole parameters, of which one at a time
  // is held and converted.
  absl::Status Save(const std::string& directory, DType dtype, TensorSource parameters) const;
  // The same by several processes, each of which writes one file of weights: the tensors of an
  // export, and which file has which. One file is model.safetensors; of several, number i is
  // model-<i+1>-of-<count>.safetensors, and each has about as many bytes.
  struct ExportPlan {
    DType dtype = DType::kFloat32;
    int count = 1;
    std::vector<WeightSpec> tensors;  // in the order of Parameters
    std::vector<int> file_of_tensor;
    std::map<std::string, int> file_of_parameter;
  };
  // Plans at most `most_files` files, none of which is empty.
  ExportPlan PlanExport(DType dtype, int most_files) const;
  // Writes one file of the weights: `parameters` gives the whole parameters that are in it.
  absl::Status SaveFile(const std::string& directory, const ExportPlan& plan, int file,
                        TensorSource parameters) const;
  // Writes all but the weights.
  absl::Status SaveCompanionFiles(const std::string& directory, const ExportPlan& plan) const;
  // With its own parameters. UNIMPLEMENTED unless all of them are here, and none is packed.
  absl::Status Save(const std::string& directory, DType dtype = DType::kFloat32) const;

 private:
  Model() = default;
  // Builds a model whose parameters are declared and not filled.
  static absl::StatusOr<std::unique_ptr<Model>> Build(const ModelConfig& config,
                                                      const HeadOptions& head,
                                                      const LoadOptions& options);
  bool IsWhole() const;
  at::Tensor SoftCapped(const at::Tensor& logits) const;
  // Takes one tensor per parameter; nullptr: the parameter is drawn.
  void FillFrom(const std::vector<const TensorView*>& assigned, const LoadOptions& options);
  void Initialize(uint64_t seed);
  // Returns the number of values of the parameters that count.
  int64_t CountValues(bool (*counts)(const tandem::Parameter&)) const;
  // Takes the sums of all parameters as loaded.
  void RecordDigest(TensorSums sums);
  BatchImages ImagesOf(std::span<const DecodeInput> inputs,
                       std::span<const std::vector<at::Tensor>> image_rows) const;
  std::string ExportedConfig(DType dtype) const;
  // Reads those of kept_tensors_ that are in `wanted` from the source.
  absl::Status VisitKeptTensors(const std::set<std::string>& wanted, TensorVisitor visit) const;

  ModelConfig config_;
  int64_t num_token_ids_ = 0;
  const Family* family_ = nullptr;
  std::string source_directory_;
  // Tensors of the source that exports contain as they are (Family::KeepsTensor).
  std::vector<WeightSpec> kept_tensors_;
  HeadKind head_ = HeadKind::kLm;
  ValueHeadSource value_head_source_ = ValueHeadSource::kNone;
  uint64_t value_head_seed_ = 0;
  bool tied_ = false;
  LoraOptions lora_;
  Placement placement_;
  TensorSums kept_sums_;
  std::string weights_digest_, base_digest_, source_mark_;
  std::unique_ptr<ParameterStore> store_;
  std::unique_ptr<Backbone> backbone_;
  const ops::LinearWeight* head_weight_ = nullptr;  // of the store; nullptr if it is not held
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_MODEL_H_
