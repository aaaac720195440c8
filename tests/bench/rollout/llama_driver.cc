// llama.cpp as a peer of bench_rollout.py: one model and one context. It executes every line of its
// input, and answers with one line of JSON:
//
//     llama_driver MODEL.gguf THREADS MAX_SEQUENCES MAX_LENGTH
//     time N P T   consumes N prompts of P tokens, then T - 1 passes of N tokens: {"prefill":
//                  {"seconds", "cpu_seconds"}, "decode": {"seconds", "cpu_seconds"}}. Tokens are
//                  arbitrary and nothing is sampled, as in llama-batched-bench.
//     greedy T id… writes T tokens after the prompt: {"token_ids": […]}
//
// Batch sizes are those of the rollout server (2,048 tokens); all else is llama.cpp's default.
#include <llama.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/bench/programs/moment.h"

namespace {

using tandem::bench::Moment;

constexpr uint32_t kBatchTokens = 2048;

[[noreturn]] void Die(const std::string& message) {
  std::cerr << message << std::endl;
  std::exit(1);
}

std::string Since(const Moment& begin) {
  const Moment now = Moment::Now();
  std::ostringstream json;
  json.precision(9);
  json << "{\"seconds\": " << now.seconds - begin.seconds
       << ", \"cpu_seconds\": " << now.cpu_seconds - begin.cpu_seconds << "}";
  return json.str();
}

class Driver {
 public:
  Driver(const char* path, int threads, uint32_t max_sequences, uint32_t max_length) {
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_ = llama_model_load_from_file(path, model_params);
    if (model_ == nullptr) Die(std::string("cannot load ") + path);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = max_sequences * max_length;
    params.n_batch = params.n_ubatch = kBatchTokens;
    params.n_seq_max = max_sequences;
    params.n_threads = params.n_threads_batch = threads;
    context_ = llama_init_from_model(model_, params);
    if (context_ == nullptr) Die("cannot make a context");
    vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    batch_ = llama_batch_init(static_cast<int32_t>(kBatchTokens), 0, 1);
  }

  std::string Time(int sequences, int prompt_tokens, int new_tokens) {
    if (sequences * prompt_tokens > static_cast<int>(kBatchTokens)) Die("too many prompt tokens");
    llama_memory_clear(llama_get_memory(context_), true);
    batch_.n_tokens = 0;
    for (int s = 0; s < sequences; ++s) {
      for (int i = 0; i < prompt_tokens; ++i) Add(Token(s, i), i, s, i + 1 == prompt_tokens);
    }
    const Moment prefill = Moment::Now();
    Decode();
    const std::string prefill_time = Since(prefill);
    const Moment decode = Moment::Now();
    for (int i = prompt_tokens; i < prompt_tokens + new_tokens - 1; ++i) {
      batch_.n_tokens = 0;
      for (int s = 0; s < sequences; ++s) Add(Token(s, i), i, s, true);
      Decode();
    }
    return "{\"prefill\": " + prefill_time + ", \"decode\": " + Since(decode) + "}";
  }

  std::string Greedy(int new_tokens, const std::vector<llama_token>& prompt) {
    llama_memory_clear(llama_get_memory(context_), true);
    batch_.n_tokens = 0;
    const int length = static_cast<int>(prompt.size());
    for (int i = 0; i < length; ++i) Add(prompt[i], i, 0, i + 1 == length);
    std::ostringstream ids;
    for (int i = 0; i < new_tokens; ++i) {
      Decode();
      const float* logits = llama_get_logits_ith(context_, -1);
      const auto token =
          static_cast<llama_token>(std::max_element(logits, logits + vocabulary_) - logits);
      ids << (i == 0 ? "" : ", ") << token;
      batch_.n_tokens = 0;
      Add(token, length + i, 0, true);
    }
    return "{\"token_ids\": [" + ids.str() + "]}";
  }

 private:
  llama_token Token(int sequence, int position) const {
    return static_cast<llama_token>((7919LL * (position + 1) + 104729LL * sequence) % vocabulary_);
  }

  void Add(llama_token token, int position, int sequence, bool output) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = token;
    batch_.pos[i] = position;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = output;
  }

  void Decode() {
    if (llama_decode(context_, batch_) != 0) Die("llama_decode failed");
    llama_synchronize(context_);
  }

  llama_model* model_;
  llama_context* context_;
  llama_batch batch_;
  int vocabulary_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) Die("llama_driver MODEL.gguf THREADS MAX_SEQUENCES MAX_LENGTH");
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  Driver driver(argv[1], std::atoi(argv[2]), static_cast<uint32_t>(std::atoi(argv[3])),
                static_cast<uint32_t>(std::atoi(argv[4])));
  std::cout << "{\"ready\": true}" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "time") {
      int sequences, prompt_tokens, new_tokens;
      if (!(words >> sequences >> prompt_tokens >> new_tokens)) Die("bad line: " + line);
      std::cout << driver.Time(sequences, prompt_tokens, new_tokens) << std::endl;
    } else if (command == "greedy") {
      int new_tokens;
      if (!(words >> new_tokens)) Die("bad line: " + line);
      std::vector<llama_token> prompt;
      for (llama_token token; words >> token;) prompt.push_back(token);
      std::cout << driver.Greedy(new_tokens, prompt) << std::endl;
    } else {
      Die("unknown: " + line);
    }
  }
}
