// The generator's interface to a model: a pass over sequences whose keys and values lie in blocks
// of a cache. No tensors, so that tests of the generator use a fake.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_MODEL_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_MODEL_RUNNER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/errors/status_macros.h"
#include "common/coauthoring/tandem_config.h"
#include "common/coauthoring/tandem_sampler.h"
#include "common/coauthoring/trajectory.h"
#include "common/model/passes/decode_input.h"

namespace tandem::rollout {

// A row of a pass whose logits are wanted: a token is drawn from them, or the log-prob of a given
// token is read.
struct OutputRow {
  static constexpr int32_t kDraw = -1;
  int32_t token = kDraw;  // whose log-prob is wanted
  double u = 0;           // kDraw: the uniform number that chooses the token
  const SamplingParams* sampling =
      nullptr;          // not null; for a log-prob the temperature alone counts
  int32_t num_top = 0;  // of the likeliest tokens that are wanted, too
  // kDraw: as in TandemSampler::Sample.
  DraftProposal proposal = {};
  std::vector<float>* distribution = nullptr;
};

// The numbers of an output row that a device reads beside its logits (device_sampler.h).
inline constexpr int64_t kDrawNumbers = 6;

// Returns what a row wants of its logits.
inline absl::StatusOr<SampledToken> ReadRow(TandemSampler& sampler, std::span<const float> logits,
                                            const OutputRow& row) {
  SampledToken read = {.token = row.token};
  if (row.token == OutputRow::kDraw) {
    TANDEM_ASSIGN_OR_RETURN(
        read, sampler.Sample(logits, *row.sampling, row.u, row.proposal, row.distribution));
  } else {
    TANDEM_ASSIGN_OR_RETURN(read.logprob,
                            sampler.TokenLogProb(logits, row.sampling->temperature, row.token));
  }
  if (row.num_top > 0) read.top = sampler.Top(logits, static_cast<size_t>(row.num_top));
  return read;
}

// A whole block that is copied before the pass, in the order of the list.
struct BlockCopy {
  int32_t from = 0;
  int32_t to = 0;
};

struct Pass {
  std::span<const BlockCopy> copies;
  std::span<const DecodeInput> sequences;
  std::span<const OutputRow> rows;  // the output rows of the sequences, one after the other
  // Whether the tokens are not known yet, but drawn by the pass that was started before: tokens of
  // the sequences are numbers of its rows then.
  bool follows = false;
};

// The results of a pass, in the order of its rows. For a log-prob `token` is the given one and
// log_keep_mass is 0. A row whose logits are not numbers has an error of its own.
using PassResults = std::vector<absl::StatusOr<SampledToken>>;

// A row of the last pass after which drafts are wanted.
struct DraftRequest {
  int64_t row = 0;    // index in the pass's PassResults
  int32_t token = 0;  // drawn from the row
};

// The caller knows which blocks there are and what they contain (block_pool.h); the runner
// only has their memory.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Runs one pass and overwrites `results`. Logits do not leave the runner. After an error the
  // blocks that the pass writes hold nothing of use.
  virtual absl::Status Run(const Pass& pass, PassResults& results) = 0;

  // Whether Start returns before the pass has been computed, as on a GPU.
  virtual bool RunsBehindTheHost() const { return false; }
  // The two halves of Run: Start begins a pass, and Finish waits for it and has the results, and
  // the error of a pass that failed behind the host. Nothing else of the runner is called between
  // the two, but Start of a pass that follows; Finish ends the older of the two. `results` stay,
  // and what `pass` refers to has been read when Start returns. After an error of Start there is
  // nothing to finish, and the pass before is what it was.
  virtual absl::Status Start(const Pass& pass, PassResults& results) { return Run(pass, results); }
  virtual absl::Status Finish() { return absl::OkStatus(); }

  // Overwrites `drafts` with the `count` tokens that the heads of a speculator propose behind each
  // request, one request after the other: [number of requests, count]. The rows are those of the
  // last Run, which succeeded. Hidden states do not leave the runner. INVALID_ARGUMENT for a row
  // that the pass did not have, or a count beyond the heads; UNIMPLEMENTED without a speculator.
  virtual absl::Status Draft(std::span<const DraftRequest> /*requests*/, int64_t /*count*/,
                             std::vector<int32_t>& /*drafts*/) {
    return absl::UnimplementedError("the model has no speculator");
  }

  // Overwrites `experts` with those that the first `count` tokens in `blocks` took, all of which
  // passes with DecodeInput::records_routing have consumed. UNIMPLEMENTED without experts.
  virtual absl::Status ReadRouting(std::span<const int32_t> /*blocks*/, int64_t /*count*/,
                                   TokenExperts& /*experts*/) {
    return absl::UnimplementedError("the model has no experts");
  }
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_MODEL_RUNNER_H_
