// A speculator: a small model beside a language model that drafts the next tokens, one with each of
// its heads. It reads the language model's last hidden state, after the final norm, and the tokens
// that follow.
//
//   TANDEM_ASSIGN_OR_RETURN(auto speculator, speculator::LoadSpeculator(directory, options));
//   TANDEM_ASSIGN_OR_RETURN(const at::Tensor drafts, speculator->Draft(hidden, tokens, 3));
//
// N rows, d the hidden size of the language model, m the width of a state, V the number of token
// ids. At step i a pass consumes a token and gives the state [N, m] that head i turns into logits.
// In training the tokens are those of the text; in drafting they are the speculator's own, after
// the first.
//
// A speculator lives on one device. Functions may throw c10::Error as libtorch does; engines turn
// that into a Status at their edge.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/model/config/parameter_spec.h"
#include "common/ops/products/packed_weight.h"
#include "common/tensor/aten/named_tensors.h"

namespace tandem::speculator {

struct SpeculatorKind;

struct SpeculatorSizes {
  int64_t hidden_size = 0;  // d
  int64_t state_size = 0;   // m
  int64_t vocab_size = 0;   // rows of an embedding and of a head
  int64_t n_predict = 0;    // heads
};

struct SpeculatorOptions {
  // Number of token ids, at most vocab_size; 0: as many as that. The other rows are padding: they
  // are never drafted and get no logit.
  int64_t num_token_ids = 0;
  // Whether the parameters are leaves that require gradients.
  bool requires_grad = false;
  at::Device device = at::kCPU;
  // float32, or float64 for tests of gradients.
  at::ScalarType dtype = at::kFloat;
  // Whether heads are packed in 8-bit integers, for a speculator that drafts and does not train.
  // Needs ops::PackedWeight::IsSupported().
  bool packs_heads = false;
};

// A parameter before it has memory.
struct SpeculatorParameterSpec {
  ParameterSpec spec;            // the name is that of files, without the kind's prefix
  double initializer_range = 0;  // of Init::kNormal
  // Further names under which files hold the same values: those of the steps tied to it.
  std::vector<std::string> repeats = {};
};

struct SpeculatorParameter : SpeculatorParameterSpec {
  at::Tensor value;  // a view of Speculator::buffer(); undefined if the parameter is packed
  // The matrix of a packed head; null before AllocateParameters.
  std::shared_ptr<ops::PackedWeight> packed = nullptr;

  int64_t bytes() const;
  // Takes values [shape] of any floating-point type and device.
  void Assign(const at::Tensor& values) const;
};

// The rows that a pass starts from.
struct SpeculatorInput {
  at::Tensor hidden;  // [N, d] of any floating-point type
  // Sequence s has the rows [offsets[s], offsets[s + 1]), in the order of its tokens: for kinds
  // whose rows attend to each other.
  std::vector<int64_t> offsets;
};

// One pass over the steps of N rows. With autograd if that is enabled.
class SpeculatorPass {
 public:
  virtual ~SpeculatorPass() = default;
  // Consumes the token of each row, [N] int64 in [0, vocab_size), and returns the state [N, m]
  // before the head of this step. The first call is step 0.
  virtual at::Tensor Step(const at::Tensor& tokens) = 0;
};

class Speculator {
 public:
  virtual ~Speculator() = default;
  Speculator(const Speculator&) = delete;
  Speculator& operator=(const Speculator&) = delete;

  // Starts a pass. The speculator must outlive it.
  virtual std::unique_ptr<SpeculatorPass> Begin(const SpeculatorInput& input) const = 0;

  // Returns the states of all steps, n_predict times [N, m]; `tokens` has one [N] per step.
  std::vector<at::Tensor> States(const SpeculatorInput& input,
                                 absl::Span<const at::Tensor> tokens) const;
  // Returns the logits [N, V] of a step's states [N, m].
  at::Tensor Logits(int64_t step, const at::Tensor& states) const;
  // Drafts greedily: `count` tokens [N, count] int64 that follow `tokens` [N], each of which was
  // drawn from the logits of its row of `hidden` [N, d]. Each draft is the lowest id among those
  // with the greatest logit. Without autograd. INVALID_ARGUMENT for a count outside [1, n_predict]
  // or for tensors of other shapes.
  absl::StatusOr<at::Tensor> Draft(const at::Tensor& hidden, const at::Tensor& tokens,
                                   int64_t count) const;

  // The matrix [vocab_size, m] of a step's head, a parameter; tied heads are the same tensor.
  // Undefined if heads are packed.
  const at::Tensor& head(int64_t step) const { return head_parameter(step).value; }
  // Its rows [V, m] of token ids.
  at::Tensor output_weight(int64_t step) const { return head(step).narrow(0, 0, num_token_ids_); }

  const SpeculatorKind& kind() const { return kind_; }
  const SpeculatorSizes& sizes() const { return sizes_; }
  int64_t num_token_ids() const { return num_token_ids_; }
  bool requires_grad() const { return requires_grad_; }
  bool packs_heads() const { return packs_heads_; }
  // The content of config.json: the kind's keys, and the others that it was read with.
  const nlohmann::json& config() const { return config_; }
  // The kind's keys alone, as text: equal for speculators that compute alike and have the same
  // parameters.
  const std::string& settings() const { return settings_; }

  // All parameters in a fixed order, each once. They share storage with the speculator.
  const std::vector<SpeculatorParameter>& parameters() const { return parameters_; }
  // The digest that ManifestOf (speculator_update.h) gives the weights as loaded from a directory;
  // empty for others.
  const std::string& loaded_digest() const { return loaded_digest_; }
  // The memory of all parameters that are not packed: flat, each aligned to 32 values.
  const at::Tensor& buffer() const { return buffer_; }
  // Returns the parameter of that name; throws c10::Error if there is none.
  const at::Tensor& Value(absl::string_view name) const;

  // The following three are called once, before anything else.

  // Adds the keys of a config.json that config() lacks.
  void KeepOtherKeys(const nlohmann::json& config);
  // Gives the parameters memory, which is not initialised.
  void AllocateParameters();
  void SetLoadedDigest(std::string digest) { loaded_digest_ = std::move(digest); }

 protected:
  // Declares the parameters, without memory. `config` has the kind's keys. The heads are the
  // parameters "head.<step>.weight".
  Speculator(const SpeculatorKind& kind, const SpeculatorSizes& sizes, nlohmann::json config,
             const std::vector<SpeculatorParameterSpec>& specs, const SpeculatorOptions& options);

 private:
  const SpeculatorParameter& head_parameter(int64_t step) const {
    return parameters_[heads_[static_cast<size_t>(step)]];
  }

  const SpeculatorKind& kind_;
  const SpeculatorSizes sizes_;
  const int64_t num_token_ids_;
  const bool requires_grad_;
  const bool packs_heads_;
  nlohmann::json config_;
  const std::string settings_;
  at::Tensor buffer_;
  std::vector<SpeculatorParameter> parameters_;
  std::vector<size_t> heads_;  // by step the index of the parameter
  std::string loaded_digest_;
};

// The name of the head of a step, in files of every kind.
std::string HeadName(int64_t step);

// Checks sizes that a configuration asks for. INVALID_ARGUMENT for "n_predict", "vocab_size",
// "inner_dim" (state_size) or `hidden_field` beyond all use.
absl::Status CheckSizes(const SpeculatorSizes& sizes, absl::string_view hidden_field);

// Checks options for a speculator of these sizes. INVALID_ARGUMENT for more token ids than the
// vocabulary has, UNIMPLEMENTED for another dtype.
absl::Status CheckOptions(const SpeculatorOptions& options, const SpeculatorSizes& sizes);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_H_
