// A ModelRunner without tensors. Its logits are a hash of all consumed tokens, so a wrong cursor,
// block or prefix shows at once.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_FAKE_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_FAKE_RUNNER_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/coauthoring/tandem_sampler.h"
#include "common/model/passes/layer_cache.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {

class FakeRunner : public ModelRunner {
 public:
  FakeRunner(uint64_t weights, int32_t vocab_size, int64_t num_blocks)
      : weights_(weights), vocab_size_(vocab_size), blocks_(num_blocks), recorded_(num_blocks) {}

  // Returns the row of logits after `tokens`.
  std::vector<float> Logits(std::span<const int32_t> tokens) const {
    uint64_t state = weights_ * 0x9E3779B97F4A7C15;
    const size_t read = std::min(tokens.size(), memory);
    for (const int32_t token : tokens.last(read))
      state = Mix(state ^ static_cast<uint64_t>(token + 1));
    std::vector<float> logits(vocab_size_);
    for (int32_t id = 0; id < vocab_size_; ++id) {
      logits[id] = static_cast<float>(Mix(state + id) % 4096) / 1024.0f;
    }
    return logits;
  }

  absl::Status Run(const Pass& pass, PassResults& results) override {
    ++passes;
    for (const BlockCopy& copy : pass.copies) {
      blocks_.at(copy.to) = blocks_.at(copy.from);
      recorded_.at(copy.to) = recorded_.at(copy.from);
    }
    int64_t pass_tokens = 0;
    for (const DecodeInput& sequence : pass.sequences) {
      for (size_t i = 0; i < sequence.tokens.size(); ++i) {
        const int64_t position = sequence.start + static_cast<int64_t>(i);
        const int32_t token = sequence.tokens[i];
        TokenAt(sequence, position) = pass.follows ? drawn_.at(token) : token;
        const int32_t block = sequence.blocks[position / kKvBlockTokens];
        recorded_.at(block)[position % kKvBlockTokens] = sequence.records_routing;
      }
      pass_tokens += static_cast<int64_t>(sequence.tokens.size());
    }
    consumed += pass_tokens;
    largest_pass = std::max(largest_pass, pass_tokens);
    drawn_.assign(pass.rows.size(), 0);
    if (!fail_next.ok()) return std::exchange(fail_next, absl::OkStatus());
    results.clear();
    read_.clear();
    TandemSampler sampler;
    auto next = pass.rows.begin();
    for (const DecodeInput& sequence : pass.sequences) {
      for (const int64_t index : sequence.output_rows) {
        const OutputRow& row = *next++;
        std::vector<int32_t> held;
        for (int64_t p = 0; p <= sequence.start + index; ++p) {
          held.push_back(TokenAt(sequence, p));
        }
        const std::vector<float> logits = Logits(held);
        if (keep_rows) read_.push_back(held);
        results.push_back(ReadRow(sampler, logits, row));
        if (results.back().ok()) drawn_[results.size() - 1] = results.back()->token;
      }
    }
    return absl::OkStatus();
  }

  // With `late` a pass is computed when it is finished.
  bool RunsBehindTheHost() const override { return late; }
  absl::Status Start(const Pass& pass, PassResults& results) override {
    if (!late) return Run(pass, results);
    misuses += started_.size() != (pass.follows ? 1 : 0);
    if (pass.follows) {
      ++ahead_passes;
      if (!fail_ahead.ok()) return std::exchange(fail_ahead, absl::OkStatus());
      misuses += WriteSameBlock(started_.front(), pass);
    }
    started_.emplace_back(pass, results);
    results.clear();
    return absl::OkStatus();
  }
  absl::Status Finish() override {
    if (!late) return absl::OkStatus();
    ++late_passes;
    const StartedPass oldest = std::move(started_.front());
    started_.pop_front();
    return Run(oldest.pass(), *oldest.results);
  }

  // Drafts what follows greedily, each token wrong with the probability `wrong_drafts`.
  absl::Status Draft(std::span<const DraftRequest> requests, int64_t count,
                     std::vector<int32_t>& drafts) override {
    ++draft_calls;
    misuses += started_.empty() ? 0 : 1;
    if (!fail_draft.ok()) return std::exchange(fail_draft, absl::OkStatus());
    drafts.clear();
    for (const DraftRequest& request : requests) {
      std::vector<int32_t> tokens = read_.at(request.row);
      tokens.push_back(request.token);
      for (int64_t i = 0; i < count; ++i) {
        const std::vector<float> logits = Logits(tokens);
        const auto best = static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
        const bool wrong = std::bernoulli_distribution(wrong_drafts)(random_);
        tokens.push_back(wrong ? (best + 1) % vocab_size_ : best);
        drafts.push_back(tokens.back());
      }
    }
    return absl::OkStatus();
  }

  // Two layers, one expert of a token: its id, and that plus 1000. INTERNAL for a token whose
  // routing was not recorded.
  absl::Status ReadRouting(std::span<const int32_t> blocks, int64_t count,
                           TokenExperts& experts) override {
    misuses += started_.empty() ? 0 : 1;
    experts = {.layers = 2, .experts_per_token = 1, .ids = {}};
    for (int64_t p = 0; p < count; ++p) {
      const int32_t block = blocks[p / kKvBlockTokens];
      if (!recorded_.at(block)[p % kKvBlockTokens]) return absl::InternalError("not recorded");
      const auto token = static_cast<uint16_t>(blocks_.at(block)[p % kKvBlockTokens]);
      experts.ids.insert(experts.ids.end(), {token, static_cast<uint16_t>(token + 1000)});
    }
    return absl::OkStatus();
  }

  void set_weights(uint64_t weights) {
    misuses += started_.empty() ? 0 : 1;
    weights_ = weights;
  }

  // Number of the last tokens that the logits depend on. With few, responses repeat themselves.
  size_t memory = std::numeric_limits<size_t>::max();
  int64_t passes = 0;
  int64_t consumed = 0;
  int64_t largest_pass = 0;
  absl::Status fail_next;
  bool keep_rows = false;  // needed by Draft
  double wrong_drafts = 0;
  int64_t draft_calls = 0;
  absl::Status fail_draft;
  bool late = false;
  int64_t late_passes = 0;
  int64_t ahead_passes = 0;  // started before the tokens were known that they consume
  absl::Status fail_ahead;   // of the start of such a pass
  // Calls between Start and Finish that may not be, and blocks that passes which run at the same
  // time write for different sequences.
  int64_t misuses = 0;

 private:
  // A pass that has read what it refers to.
  struct StartedPass {
    StartedPass(const Pass& from, PassResults& results)
        : results(&results),
          copies(from.copies.begin(), from.copies.end()),
          rows(from.rows.begin(), from.rows.end()),
          follows(from.follows) {
      for (const DecodeInput& sequence : from.sequences) {
        blocks.emplace_back(sequence.blocks.begin(), sequence.blocks.end());
        tokens.emplace_back(sequence.tokens.begin(), sequence.tokens.end());
        output_rows.emplace_back(sequence.output_rows.begin(), sequence.output_rows.end());
        sequences.push_back(sequence);
        sequences.back().blocks = blocks.back();
        sequences.back().tokens = tokens.back();
        sequences.back().output_rows = output_rows.back();
      }
    }
    Pass pass() const {
      return {.copies = copies, .sequences = sequences, .rows = rows, .follows = follows};
    }

    PassResults* results;
    std::vector<BlockCopy> copies;
    std::deque<std::vector<int32_t>> blocks, tokens;
    std::deque<std::vector<int64_t>> output_rows;
    std::vector<DecodeInput> sequences;
    std::vector<OutputRow> rows;
    bool follows;
  };

  static bool WriteSameBlock(const StartedPass& started, const Pass& pass) {
    const auto written = [](const DecodeInput& sequence) {
      return sequence.blocks.subspan(sequence.start / kKvBlockTokens);
    };
    for (const DecodeInput& one : started.sequences) {
      for (const DecodeInput& other : pass.sequences) {
        for (const int32_t block : written(other)) {
          const auto found = std::ranges::find(written(one), block);
          if (found == written(one).end()) continue;
          const auto place = std::ranges::find(one.blocks, block) - one.blocks.begin();
          if (place >= std::ssize(other.blocks)) return true;
          if (!std::ranges::equal(one.blocks.first(place + 1), other.blocks.first(place + 1))) {
            return true;
          }
        }
      }
    }
    return false;
  }

  std::deque<StartedPass> started_;
  std::vector<int32_t> drawn_;  // by each row of the last pass

  int32_t& TokenAt(const DecodeInput& sequence, int64_t position) {
    return blocks_.at(sequence.blocks[position / kKvBlockTokens])[position % kKvBlockTokens];
  }

  static uint64_t Mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCD;
    x ^= x >> 33;
    x *= 0xC4CEB9FE1A85EC53;
    return x ^ x >> 33;
  }

  uint64_t weights_;
  const int32_t vocab_size_;
  std::vector<std::array<int32_t, kKvBlockTokens>> blocks_;  // the tokens that they hold
  std::vector<std::array<bool, kKvBlockTokens>> recorded_;   // whether their routing is recorded
  std::vector<std::vector<int32_t>> read_;                   // by each row of the last pass
  std::mt19937 random_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_FAKE_RUNNER_H_
