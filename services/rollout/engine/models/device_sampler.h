// Draws tokens on the device of the logits, so that a few numbers of each row come to the host in
// place of the row.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DEVICE_SAMPLER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DEVICE_SAMPLER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/coauthoring/tandem_sampler.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {

// Whether a row of a pass can be drawn on a device: it has neither a draft nor a wanted
// distribution. The log-prob of a token of the vocabulary can always be computed there.
bool DrawsOnDevice(const OutputRow& row, int64_t num_token_ids);

// The kinds of draws among some rows: a choice of the largest logit, the log-prob of a given token,
// or a cut. A device computes a kind for all rows, or for none.
struct DrawKinds {
  bool has_greedy = false, has_given = false, has_cuts = false;
};

// Writes the numbers [kDrawNumbers][padded] of rows of logits of `width` columns; those behind the
// rows draw from all columns. Returns what the rows need.
DrawKinds WriteDrawNumbers(std::span<const OutputRow> rows, int64_t width, int64_t padded,
                           double* numbers);

// The numbers that a device says of a drawn token: its id; its logit by the temperature, the
// largest of the row, and the sum of the exponentials below that; the logarithm of the mass that
// the cuts keep; whether they are sound.
inline constexpr int64_t kResultNumbers = 6;

// Returns the tokens that a device draws from logits [N, V] of any floating-point type, without a
// wait: [N, kResultNumbers] float64. `numbers` [kDrawNumbers, N] float64 are on the device.
at::Tensor DrawTokens(const at::Tensor& logits, const at::Tensor& numbers, const DrawKinds& kinds);

// Returns the largest logit by the temperature of each row, and the sum of the exponentials below
// it, [2, N] float32 on the device of the logits [N, V], as the loss of a GPU sums them up: for
// rows that the host draws. Undefined where no kernel does so.
at::Tensor RowStatistics(const at::Tensor& logits, std::span<const OutputRow> rows);

// Tokens that a device draws, from some rows of logits after the other.
class DeviceDraws {
 public:
  // Forgets what was drawn, and keeps the memory for it.
  void Clear();

  // Draws a token from each row of logits [N, V] on a device, of any floating-point type, without a
  // wait for the device. `results`, one for each row, outlives Read. Every row must satisfy
  // DrawsOnDevice.
  void Draw(const at::Tensor& logits, std::span<const OutputRow> rows,
            std::span<absl::StatusOr<SampledToken>> results);

  // Takes what DrawTokens returned for rows that begin with those of `results`.
  void Add(const at::Tensor& drawn, std::span<absl::StatusOr<SampledToken>> results);

  // Lets the device copy what it drew to the host, behind its work on the current stream, without a
  // wait. No row is drawn after it.
  void Send();

  // Returns the tokens of all rows on the device, [N] float64, once they are sent.
  at::Tensor Tokens() const;

  // Waits for that copy, and overwrites all results with those of TandemSampler. For equal
  // logits a token is the same, but where a number lies within rounding of the border between two
  // tokens, or of a cut; log-probs are the same up to rounding, and with the kernels of a GPU they
  // have the bits of its loss.
  void Read();

 private:
  std::vector<at::Tensor> drawn_;  // [N, kResultNumbers] float64 each
  at::Tensor on_host_;             // all of them, in pinned memory of as many rows or more
  std::optional<c10::Event> sent_;
  bool was_sent_ = false;
  std::vector<std::span<absl::StatusOr<SampledToken>>> results_;  // of the same rows
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DEVICE_SAMPLER_H_
