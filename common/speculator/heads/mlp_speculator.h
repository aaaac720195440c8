// The MLP speculator (https://arxiv.org/abs/2404.19124): a recurrence of one projection, one
// embedding and one norm per step (sum_rnn.h).
#ifndef TANDEM_COMMON_SPECULATOR_HEADS_MLP_SPECULATOR_H_
#define TANDEM_COMMON_SPECULATOR_HEADS_MLP_SPECULATOR_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/speculator/heads/sum_rnn.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_kind.h"

namespace tandem::speculator {

// The keys of config.json.
struct MlpSpeculatorConfig {
  int64_t vocab_size = 0;
  int64_t emb_dim = 0;    // the hidden size of the language model
  int64_t inner_dim = 0;  // the width of a state; 0: emb_dim
  int64_t n_predict = 0;
  bool tie_weights = false;
  bool scale_input = false;
};

// Reads the keys, with the defaults of the reference implementation. INVALID_ARGUMENT names a field
// that is wrong.
absl::StatusOr<MlpSpeculatorConfig> ReadMlpSpeculatorConfig(const ConfigFields& fields);

class MlpSpeculator : public Speculator {
 public:
  // The parameters have no memory yet. INVALID_ARGUMENT names the key of `config` or the
  // field of `options`.
  static absl::StatusOr<std::unique_ptr<MlpSpeculator>> Create(const MlpSpeculatorConfig& config,
                                                               const SpeculatorOptions& options);

  std::unique_ptr<SpeculatorPass> Begin(const SpeculatorInput& input) const override;

 private:
  MlpSpeculator(const SumRnnOptions& rnn, nlohmann::json config, const SpeculatorOptions& options);

  const SumRnn rnn_;
};

// The kind "mlp".
const SpeculatorKind& MlpSpeculatorKind();

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_HEADS_MLP_SPECULATOR_H_
