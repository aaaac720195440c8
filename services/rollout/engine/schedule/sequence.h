// One sample in progress: its tokens and authors, and the position up to which each model has read.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SEQUENCE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SEQUENCE_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "common/base/philox.h"
#include "common/coauthoring/author.h"
#include "common/coauthoring/author_selector.h"
#include "common/coauthoring/stop_text.h"
#include "common/coauthoring/trajectory.h"
#include "services/rollout/engine/blocks/block_table.h"
#include "services/rollout/engine/drafts/drafter.h"
#include "services/rollout/engine/images/image_tokens.h"
#include "services/rollout/engine/schedule/request_check.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

inline constexpr Author kAuthors[] = {Author::kSenior, Author::kJunior};

// Index of an author in arrays of lanes; std::bad_optional_access for one without a lane.
inline size_t LaneIndex(Author author) { return TraitsOf(author).lane.value(); }

// One model's view of a sequence. The model has consumed the first `cursor` tokens; their keys and
// values lie in the blocks of `table`. A lane lags until its model has to write.
struct LaneState {
  BlockTable table;
  int64_t cursor = 0;
  // Number of tokens after the cursor that the model has consumed as drafts: what the sequence
  // keeps of them is not known yet.
  int64_t ahead = 0;
  // Counts the weights that keys and values come from; see Scheduler::BumpEpoch.
  int64_t epoch = 0;
  // Number of the first response tokens whose other_logprobs need no more of this model.
  int64_t other_read = 0;

  int64_t consumed() const { return cursor + ahead; }
};

struct Sequence;

// A submitted prompt with its samples.
struct Prompt {
  PromptId id = 0;
  uint64_t stream = 0;  // see Submission
  PromptRequest request;
  std::shared_ptr<PromptListener> listener;
  TokenSet stop_tokens;
  int64_t max_response_tokens = 0;  // with the response so far
  LaneImages images;                // of the prompt, as each lane reads them
  std::vector<ImageTokens> image_tokens;
  // Indexed by sample; null once finished.
  std::vector<std::unique_ptr<Sequence>> samples;
  int64_t unfinished = 0;
  int64_t samples_begun = 0;
  // Kept by Scheduler, per lane: the last Admit that counted the prompt's blocks, and the last pass
  // that reads the prompt.
  std::array<int64_t, 2> counted = {};
  std::array<int64_t, 2> read_in_pass = {};
};

struct Sequence {
  // `number` counts the samples of the prompt.
  Sequence(Prompt* prompt, uint64_t number, std::shared_ptr<const TokenSet> boundaries,
           bool eager = false)
      : prompt(prompt),
        number(number),
        sample_index(prompt->request.first_sample_index + number),
        tokens(prompt->request.prompt_token_ids),
        selector(prompt->request.tandem, prompt->request.seed, sample_index, std::move(boundaries)),
        stop_texts(prompt->request.sampling.stop),
        wants_other(prompt->request.return_other_logprobs && prompt->request.tandem.enabled),
        eager(eager && prompt->request.tandem.enabled) {
    if (records_routing(Author::kSenior)) {
      lane(Author::kSenior).table = BlockTable(kNoRecordedPrefix);
    }
    TakeResponseSoFar();
  }

  Prompt* const prompt;
  const uint64_t number;  // in prompt->samples
  const uint64_t sample_index;
  std::vector<int32_t> tokens;  // prompt and response
  AuthorSelector selector;
  StopTextFinder stop_texts;
  const bool wants_other;
  const bool eager;                    // both models consume every token as soon as it is written
  std::unique_ptr<DraftState> drafts;  // null: the prompt asks for none
  std::array<LaneState, 2> lanes;
  int64_t last_pass = 0;  // see Scheduler::LaneOrder
  // Kept by Generator: passes with the sequence that have started and not ended.
  int64_t running_passes = 0;

  // Kept by WaitingQueue.
  int64_t arrival = 0;
  bool waits = false;
  bool begun = false;    // whether it was admitted before
  bool overdue = false;  // comes before all priorities

  // Allocates the memory of the response, but not more than most responses need.
  void ReserveResponse() {
    const int64_t count = std::min<int64_t>(prompt->max_response_tokens - response_so_far(), 1024);
    tokens.reserve(given_length() + count);
    for (std::vector<float>* numbers : {&author_logprobs, &other_logprobs, &log_keep_mass}) {
      numbers->reserve(response_so_far() + count);
    }
    authors.reserve(response_so_far() + count);
    senior_weights.reserve(response_so_far() + count);
    if (drafts != nullptr) drafts->outcome.accepted_mask.reserve(count);
  }

  // One entry per response token; those of the response so far have no numbers.
  std::vector<Author> authors;
  std::vector<float> author_logprobs;
  std::vector<float> other_logprobs;  // NaN until the other model has read that far
  std::vector<float> log_keep_mass;
  TopTokens top_tokens;  // of the new tokens
  // The senior's version of each token: the version that wrote it, or, for a junior's token, the
  // version of its other_logprobs once they are computed.
  std::vector<std::shared_ptr<const WeightsVersion>> senior_weights;
  FinishReason finish_reason = FinishReason::kUnspecified;

  int64_t prompt_length() const {
    return static_cast<int64_t>(prompt->request.prompt_token_ids.size());
  }
  int64_t response_so_far() const { return std::ssize(prompt->request.response_token_ids); }
  int64_t given_length() const { return prompt->request.given_tokens(); }
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t response_length() const { return static_cast<int64_t>(authors.size()); }
  LaneState& lane(Author author) { return lanes[LaneIndex(author)]; }
  const LaneState& lane(Author author) const { return lanes[LaneIndex(author)]; }

  // Whether `author`'s model records the experts that the tokens take.
  bool records_routing(Author author) const {
    return author == Author::kSenior && prompt->request.return_routed_experts;
  }

  // Whether sampling has finished. The other model's log-probs may still be missing; see
  // complete().
  bool ended() const { return finish_reason != FinishReason::kUnspecified; }

  // Whether there is no token behind the next one, whichever that is.
  bool EndsWithNext() const {
    return ended() || response_length() + 1 >= prompt->max_response_tokens;
  }

  // Whether a pass behind the one that draws the next token waits until the host has that token:
  // drafts need it, likeliest tokens come from rows that the host draws from, and a record of
  // experts is read between two passes.
  bool NeedsHost() const {
    return drafts != nullptr || prompt->request.num_top_logprobs > 0 ||
           prompt->request.return_routed_experts;
  }

  // Whether the hidden state at `position` gives `author`'s log-prob of a response token that the
  // other model wrote, and that log-prob is missing.
  bool NeedsOther(Author author, int64_t position) const {
    const int64_t r = position + 1 - prompt_length();
    return wants_other && r >= 0 && r < response_length() && authors[r] != author &&
           std::isnan(other_logprobs[r]);
  }

  // The random number of a token of the response; `position` counts the prompt, too.
  double UniformAt(int64_t position, RandomPurpose purpose) const {
    return Uniform(prompt->request.seed, sample_index,
                   static_cast<uint32_t>(position - prompt_length()), purpose);
  }

  // Whether drafts are accepted by rejection sampling. A greedy token is the same by both rules.
  bool rejection_sampling() const {
    return drafts != nullptr && prompt->request.sampling.temperature > 0.0 &&
           prompt->request.speculative.acceptance_rule == AcceptanceRule::kRejectionSampling;
  }

  // Whether the junior writes a draft of the senior's tokens next.
  bool drafting() const {
    return drafts != nullptr && drafts->wanted > std::ssize(drafts->tokens) && !ended() &&
           selector.NextAuthor() == Author::kSenior;
  }

  // Returns how many of `proposed` the next author can verify: if they are all accepted, the same
  // author writes the token after each of them, and the response has room for that token. An id
  // below 0 stands for a draft that is not known yet.
  int64_t CountUsable(std::span<const int32_t> proposed) const {
    const int64_t most = prompt->max_response_tokens - response_length() - 1;
    AuthorSelector after = selector;
    int64_t usable = 0;
    for (const int32_t token : proposed) {
      if (usable >= most || prompt->stop_tokens.contains(token)) break;
      after.OnToken(token);
      if (after.NextAuthor() != selector.NextAuthor()) break;
      ++usable;
    }
    return usable;
  }

  // Returns the number of tokens, with drafts behind them, that `author`'s model must consume for
  // the sequence to go on; 0 if it is not that model's turn, unless the sequence is eager.
  int64_t Target(Author author) const {
    if (drafting()) return author == Author::kJunior ? length() + std::ssize(drafts->tokens) : 0;
    if (!ended() && selector.NextAuthor() == author) return length();
    if (!ended()) {
      // The row of the last token may be wanted once the other model has written the next one, or
      // for a draft.
      return eager ? length() - (wants_other || drafts != nullptr ? 1 : 0) : 0;
    }
    // A record is of every token but the last.
    if (records_routing(author)) return length() - 1;
    // Only the lane that did not write the last token can lag.
    return wants_other && authors.back() != author ? length() - 1 : 0;
  }

  // Returns the first position that `author`'s model must consume itself, though another sequence
  // may have consumed the same tokens: its hidden state is wanted. Needs Target(author) > 0.
  int64_t FirstWanted(Author author) const {
    const int64_t last = std::min(Target(author), length()) - 1;
    const int64_t first = prompt_length() - 1 + lane(author).other_read;
    for (int64_t position = first; position < last; ++position) {
      if (NeedsOther(author, position)) return position;
    }
    return last;
  }

  bool complete() const {
    if (!ended()) return false;
    for (const Author author : kAuthors) {
      if (lane(author).cursor < Target(author)) return false;
    }
    return true;
  }

 private:
  void TakeResponseSoFar() {
    const PromptRequest& request = prompt->request;
    const size_t count = request.response_token_ids.size();
    tokens.insert(tokens.end(), request.response_token_ids.begin(),
                  request.response_token_ids.end());
    authors = request.response_authors;
    for (size_t i = 0; i < count; ++i) {
      if (IsDrawn(authors[i])) {
        selector.OnToken(request.response_token_ids[i]);
      } else {
        selector.OnEnvironmentToken();
      }
    }
    for (std::vector<float>* numbers : {&author_logprobs, &other_logprobs, &log_keep_mass}) {
      numbers->assign(count, 0.0f);
    }
    senior_weights.resize(count);
    for (LaneState& state : lanes) state.other_read = static_cast<int64_t>(count);
  }
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SEQUENCE_H_
