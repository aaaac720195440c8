// The vocabulary as the server needs it: the text of each id, enough to find the tokens at
// which authors change. Tokenisation itself is the client's.
#ifndef TANDEM_COMMON_COAUTHORING_VOCABULARY_H_
#define TANDEM_COMMON_COAUTHORING_VOCABULARY_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/coauthoring/author_selector.h"
#include "common/coauthoring/tandem_config.h"

namespace tandem {

// The token table of a Hugging Face tokenizer.json. Immutable, thread safe.
class Vocabulary {
 public:
  // How pieces turn into text.
  enum class Style {
    kPlain,          // the piece is the text (WordLevel)
    kByteLevel,      // GPT-2's printable stand-ins for bytes: Ġ is a space
    kSentencePiece,  // ▁ is a space, <0x0A> a byte
    kWordPiece,      // ## continues a word; others start one
  };

  // More ids than any real vocabulary has.
  static constexpr int64_t kMaxSize = 10'000'000;

  // Models BPE, Unigram, WordLevel and WordPiece, plus added tokens. INVALID_ARGUMENT when the text
  // is not such a file, or names one id for two tokens, or an id not below kMaxSize.
  static absl::StatusOr<Vocabulary> Parse(absl::string_view tokenizer_json);
  // `model_dir`/tokenizer.json; NOT_FOUND without one. Errors name the file.
  static absl::StatusOr<Vocabulary> Load(const std::string& model_dir);

  // One more than the largest id: LoadOptions::num_token_ids of the model beside it. Ids without a
  // token inside that range have an empty piece.
  int32_t size() const { return static_cast<int32_t>(entries_.size()); }
  Style style() const { return style_; }
  // The token as the file spells it ("Ġthe"); "" for an id outside.
  absl::string_view piece(int32_t id) const;
  // Special tokens (<s>, <|im_end|>, …) are control marks, not text.
  bool is_special(int32_t id) const;
  // The bytes that the id stands for; may be part of a UTF-8 character.
  std::string Decode(int32_t id) const;

  // Ids whose text ends with "\n\n" / whose piece starts with a leading-space marker (Ġ, ▁ or a
  // real space). Special tokens and `eos_token_ids` are left out.
  TokenSet SentenceBoundaries(std::span<const int32_t> eos_token_ids) const;
  TokenSet WordBoundaries(std::span<const int32_t> eos_token_ids) const;

  // XXH3-128 of "<id> <piece>\n" for every token, added ones too, by id; 32 hexadecimal digits. A
  // client computes it from its own tokenizer (testdata/generate.py shows how).
  std::string Digest() const;

  // OK when the senior and another model (`name`: "junior") agree on every id; else
  // FAILED_PRECONDITION (reason "VOCABULARY_MISMATCH") with the first id at which size, text or
  // special flag differ.
  static absl::Status CheckSame(const Vocabulary& senior, const Vocabulary& other,
                                absl::string_view name = "junior");

 private:
  struct Entry {
    std::string piece;
    bool given = false;  // false: no token has this id
    bool added = false;  // decoded as it is spelt
    bool special = false;
  };
  std::vector<Entry> entries_;
  Style style_ = Style::kPlain;
};

// The boundary sets of one model, computed once.
class BoundarySets {
 public:
  // `eos_token_ids`: those of config.json and generation_config.json together.
  BoundarySets(const Vocabulary& vocabulary, std::span<const int32_t> eos_token_ids);

  // The set in force for `config`: its own ids, or the strategy's default; empty for strategies
  // that read none.
  std::shared_ptr<const TokenSet> Resolve(const TandemConfig& config) const;

  // The `sentence` default set, which the metric tokens_per_sent counts by.
  const TokenSet& sentence() const { return *sentence_; }

 private:
  std::shared_ptr<const TokenSet> sentence_;
  std::shared_ptr<const TokenSet> word_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_VOCABULARY_H_
