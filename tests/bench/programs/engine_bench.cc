// The rollout engine called directly, as a side of bench_rollout.py without gRPC. It executes every
// line of its input, and answers with one line of JSON:
//
//     tandem-engine-bench senior_model=DIR max_num_seqs=16     settings of a rollout server
//     time N P T   N prompts of P tokens, T tokens after each, all streamed, the senior alone:
//                  {"prefill": {"seconds", "cpu_seconds"}, "decode": {"seconds", "cpu_seconds"}}.
//                  The first token of the first sequence ends the prefill.
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/base/machine/freed_memory.h"
#include "common/config/config.h"
#include "common/config/server_config.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/service/convert.h"
#include "tests/bench/programs/moment.h"

namespace {

using nlohmann::json;
using tandem::bench::Moment;
using tandem::rollout::PromptListener;

template <typename Result>
void Check(const Result& result) {
  if (result.ok()) return;
  std::cerr << result << std::endl;
  std::exit(1);
}

json Since(const Moment& earlier, const Moment& later) {
  return {{"seconds", later.seconds - earlier.seconds},
          {"cpu_seconds", later.cpu_seconds - earlier.cpu_seconds}};
}

// The events of all prompts of a job.
class Progress {
 public:
  explicit Progress(int64_t sequences) : unfinished_(sequences) {}

  void OnTokens() {
    std::lock_guard lock(mutex_);
    if (!first_) first_ = Moment::Now();
  }
  void OnFinished() {
    std::lock_guard lock(mutex_);
    if (--unfinished_ == 0) all_finished_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    all_finished_.wait(lock, [&] { return unfinished_ == 0; });
  }
  // Call after Wait.
  const Moment& first() const { return *first_; }

 private:
  std::mutex mutex_;
  std::condition_variable all_finished_;
  int64_t unfinished_;
  std::optional<Moment> first_;
};

class Listener final : public PromptListener {
 public:
  explicit Listener(Progress* progress) : progress_(progress) {}
  void OnTokens(tandem::rollout::TokensDelta) override { progress_->OnTokens(); }
  void OnFinished(tandem::Trajectory, tandem::rollout::SampleDrafts) override {
    progress_->OnFinished();
  }
  void OnFailed(absl::Status status) override { Check(status); }

 private:
  Progress* const progress_;
};

json Time(tandem::rollout::Engine& engine, int64_t sequences, int64_t prompt_tokens,
          int32_t new_tokens, bool tandem) {
  Progress progress(sequences);
  std::vector<tandem::rollout::Submission> batch;
  for (int64_t s = 0; s < sequences; ++s) {
    tandem::rollout::PromptRequest request;
    for (int64_t i = 0; i < prompt_tokens; ++i) {
      request.prompt_token_ids.push_back(
          static_cast<int32_t>(1000 + (7919 * (i + 1) + 104729 * s) % 19000));
    }
    request.sampling.max_tokens = new_tokens;
    request.sampling.ignore_eos = true;
    request.tandem.enabled = tandem;
    if (tandem) request.tandem.selection_strategy = ::tandem::SelectionStrategy::kWord;
    request.seed = static_cast<uint64_t>(s);
    request.stream_tokens = true;
    batch.push_back({std::move(request), std::make_shared<Listener>(&progress)});
  }
  const Moment begin = Moment::Now();
  Check(engine.Submit(std::move(batch)).status());
  progress.Wait();
  const Moment end = Moment::Now();
  return {{"prefill", Since(begin, progress.first())}, {"decode", Since(progress.first(), end)}};
}

}  // namespace

int main(int argc, char** argv) {
  tandem::KeepFreedMemory();
  tandem::config::RolloutServerConfig config;
  Check(tandem::config::Load({.overrides = {argv + 1, argv + argc}}, &config));
  Check(tandem::config::Resolve(&config));
  const auto engine =
      tandem::rollout::CreateEngine(tandem::rollout::ToEngineOptions(config, /*environment=*/{}));
  Check(engine.status());
  std::cout << json{{"ready", true}} << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    int64_t sequences, prompt_tokens;
    int32_t new_tokens;
    if (!(words >> command >> sequences >> prompt_tokens >> new_tokens) ||
        (command != "time" && command != "tandem")) {
      std::cerr << "unknown: " << line << std::endl;
      return 1;
    }
    std::cout << Time(**engine, sequences, prompt_tokens, new_tokens, command == "tandem")
              << std::endl;
  }
}
