// The speculator of Arctic Inference (https://github.com/snowflakedb/ArcticInference). Its method
// "sum_lstm" has the gates of an LSTM:
//   a = proj(state) + factor emb(token), for the gates forget, input, output and the cell each;
//   cell = cell * sigmoid(a_forget) + GELU(cell_ln(a_cell)) * sigmoid(a_input), 0 at first;
//   state = GELU(state_ln(cell)) * sigmoid(a_output), logits_i = head_i(state).
// Its method "sum_rnn" is the recurrence of the MLP speculator (sum_rnn.h).
#ifndef TANDEM_COMMON_SPECULATOR_HEADS_ARCTIC_LSTM_SPECULATOR_H_
#define TANDEM_COMMON_SPECULATOR_HEADS_ARCTIC_LSTM_SPECULATOR_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "common/speculator/heads/recurrence.h"
#include "common/speculator/heads/sum_rnn.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_kind.h"

namespace tandem::speculator {

enum class ArcticMethod { kSumRnn, kSumLstm };

// The keys of config.json.
struct ArcticLstmSpeculatorConfig {
  int64_t vocab_size = 0;
  int64_t input_hidden_dim = 0;  // the hidden size of the language model
  // The width of a state. A token's embedding and the projected state are added up, so all three
  // are equal.
  int64_t inner_dim = 0, proj_dim = 0, emb_dim = 0;
  int64_t n_predict = 0;
  ArcticMethod method = ArcticMethod::kSumRnn;
  bool tie_weights = false;    // as in sum_rnn.h; needed by kSumLstm
  bool tie_lstm_embs = false;  // kSumLstm: whether the gates and the cell share an embedding
  bool scale_input = false;
};

// Reads the keys, with the defaults of the reference implementation: method "sum_rnn", nothing
// tied. A width may be text, as the reference writes it. INVALID_ARGUMENT names a field that is
// missing or wrong, UNIMPLEMENTED a width that stands for several layers ("4096.4096").
absl::StatusOr<ArcticLstmSpeculatorConfig> ReadArcticLstmSpeculatorConfig(
    const ConfigFields& fields);

class ArcticLstmSpeculator : public Speculator {
 public:
  // The parameters have no memory yet. INVALID_ARGUMENT names the key of `config` or the
  // field of `options`.
  static absl::StatusOr<std::unique_ptr<ArcticLstmSpeculator>> Create(
      const ArcticLstmSpeculatorConfig& config, const SpeculatorOptions& options);

  std::unique_ptr<SpeculatorPass> Begin(const SpeculatorInput& input) const override;

 private:
  class LstmPass;
  static constexpr size_t kGates = 4;  // forget, input, output, and the cell
  // The maps of each of the gates.
  struct Lstm {
    std::array<at::Tensor, kGates> embeddings;
    std::array<at::Tensor, kGates> first_projections;  // of step 0
    std::array<at::Tensor, kGates> projections;        // of the other steps
    NormWeights cell_norm, state_norm;
  };

  ArcticLstmSpeculator(const ArcticLstmSpeculatorConfig& config, const SpeculatorOptions& options);
  void BindLstm(bool tie_lstm_embs);

  const bool scale_input_;
  const double factor_;
  std::optional<SumRnn> rnn_;  // kSumRnn
  std::optional<Lstm> lstm_;   // kSumLstm
};

// The kind "arctic_lstm".
const SpeculatorKind& ArcticLstmSpeculatorKind();

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_HEADS_ARCTIC_LSTM_SPECULATOR_H_
