#include "common/coauthoring/vocabulary.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/bounded_json.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kByteLevelSpace = "\u0120";      // Ġ
constexpr absl::string_view kSentencePieceSpace = "\u2581";  // ▁
constexpr size_t kMaxFileBytes = 200'000'000;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("not a tokenizer.json: ", what));
}

// Whether `node`, or a member of it if it is a Sequence, has this type.
bool HasType(const Json& node, const char* type) {
  if (!node.is_object()) return false;
  if (node.value("type", Json()) == type) return true;
  for (const char* list : {"decoders", "pretokenizers"}) {
    if (!node.contains(list) || !node[list].is_array()) continue;
    for (const Json& item : node[list]) {
      if (HasType(item, type)) return true;
    }
  }
  return false;
}

Vocabulary::Style FindStyle(const Json& root, bool any_sentencepiece_marker) {
  const Json decoder = root.value("decoder", Json());
  const Json pre_tokenizer = root.value("pre_tokenizer", Json());
  if (HasType(decoder, "ByteLevel") || HasType(pre_tokenizer, "ByteLevel")) {
    return Vocabulary::Style::kByteLevel;
  }
  if (HasType(decoder, "WordPiece")) return Vocabulary::Style::kWordPiece;
  if (HasType(decoder, "Metaspace") || HasType(pre_tokenizer, "Metaspace") ||
      HasType(decoder, "ByteFallback") || any_sentencepiece_marker) {
    return Vocabulary::Style::kSentencePiece;
  }
  return Vocabulary::Style::kPlain;
}

// GPT-2's bytes_to_unicode backwards: printable Latin-1 stands for itself, the other bytes for the
// characters from U+0100 on.
const std::map<uint32_t, uint8_t>& ByteOfCharacter() {
  static const auto* const table = [] {
    auto* result = new std::map<uint32_t, uint8_t>;
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
                             (byte >= 0xAE && byte <= 0xFF);
      (*result)[printable ? byte : next++] = static_cast<uint8_t>(byte);
    }
    return result;
  }();
  return *table;
}

// Calls visit(code point, its bytes) along valid UTF-8 (the JSON parser has checked it).
template <typename Visit>
void ForEachCharacter(absl::string_view text, Visit visit) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    uint32_t code = length == 1 ? lead : lead & (0x7F >> length);
    for (size_t j = 1; j < length && i + j < text.size(); ++j) {
      code = code << 6 | (static_cast<uint8_t>(text[i + j]) & 0x3F);
    }
    visit(code, text.substr(i, length));
    i += length;
  }
}

std::string DecodeByteLevel(absl::string_view piece) {
  std::string text;
  ForEachCharacter(piece, [&](uint32_t code, absl::string_view bytes) {
    const auto found = ByteOfCharacter().find(code);
    if (found != ByteOfCharacter().end()) {
      text.push_back(static_cast<char>(found->second));
    } else {
      text.append(bytes.data(), bytes.size());
    }
  });
  return text;
}

std::string DecodeSentencePiece(absl::string_view piece) {
  unsigned byte = 0;
  int used = 0;
  if (piece.size() == 6 &&
      std::sscanf(std::string(piece).c_str(), "<0x%2X>%n", &byte, &used) == 1 && used == 6) {
    return std::string(1, static_cast<char>(byte));
  }
  std::string text;
  ForEachCharacter(piece, [&](uint32_t, absl::string_view bytes) {
    if (bytes == kSentencePieceSpace) {
      text.push_back(' ');
    } else {
      text.append(bytes.data(), bytes.size());
    }
  });
  return text;
}

}  // namespace

absl::StatusOr<Vocabulary> Vocabulary::Parse(absl::string_view tokenizer_json) {
  TANDEM_ASSIGN_OR_RETURN(const Json root, ParseBoundedJson(tokenizer_json, "tokenizer.json"));
  if (!root.is_object()) return Malformed("it is not a JSON object");
  if (!root.contains("model") || !root["model"].contains("vocab")) {
    return Malformed("it has no model.vocab");
  }
  Vocabulary result;
  bool any_marker = false;
  const auto put = [&](int64_t id, Entry entry) -> absl::Status {
    if (id < 0 || id >= kMaxSize) {
      return Malformed(
          absl::StrCat("token id ", id, " (\"", entry.piece, "\") is not in [0, ", kMaxSize, ")"));
    }
    if (id >= result.size()) result.entries_.resize(id + 1);
    Entry& place = result.entries_[id];
    if (place.given && place.piece != entry.piece) {
      return Malformed(absl::StrCat("token id ", id, " is given to \"", place.piece, "\" and to \"",
                                    entry.piece, "\""));
    }
    any_marker |= absl::StartsWith(entry.piece, kSentencePieceSpace);
    place = std::move(entry);
    place.given = true;
    return absl::OkStatus();
  };

  const Json& vocab = root["model"]["vocab"];
  if (vocab.is_object()) {
    for (const auto& [piece, id] : vocab.items()) {
      if (!id.is_number_integer()) return Malformed("an id of model.vocab is not a number");
      TANDEM_RETURN_IF_ERROR(put(id.get<int64_t>(), {.piece = piece}));
    }
  } else if (vocab.is_array()) {  // Unigram: [[piece, score], …]
    for (size_t id = 0; id < vocab.size(); ++id) {
      if (!vocab[id].is_array() || vocab[id].empty() || !vocab[id][0].is_string()) {
        return Malformed("model.vocab is neither a map nor a list of [piece, score]");
      }
      TANDEM_RETURN_IF_ERROR(
          put(static_cast<int64_t>(id), {.piece = vocab[id][0].get<std::string>()}));
    }
  } else {
    return Malformed("model.vocab is neither a map nor a list");
  }
  // The `tokenizers` library, and with it every client, numbers added tokens by itself: one of the
  // model's vocabulary has the id there, another the next free one. Holes that the file's ids leave
  // close.
  std::map<std::string, int64_t> id_of;
  for (int32_t id = 0; id < result.size(); ++id) {
    if (result.entries_[id].given) id_of[result.entries_[id].piece] = id;
  }
  const int64_t vocab_size = static_cast<int64_t>(vocab.size());
  int64_t last_added = -1;
  for (const Json& token : root.value("added_tokens", Json::array())) {
    if (!token.is_object() || !token.contains("id") || !token["id"].is_number_integer() ||
        !token.contains("content") || !token["content"].is_string()) {
      return Malformed("an added token without id or content");
    }
    const std::string piece = token["content"].get<std::string>();
    if (piece.empty()) continue;  // The library passes it over, too.
    const auto [known, is_new] = id_of.try_emplace(piece, std::max(vocab_size, last_added + 1));
    last_added = std::max(last_added, known->second);
    const Json special = token.value("special", Json(false));
    TANDEM_RETURN_IF_ERROR(put(
        known->second,
        {.piece = piece, .added = true, .special = special.is_boolean() && special.get<bool>()}));
  }
  if (result.entries_.empty()) return Malformed("the vocabulary is empty");
  result.style_ = FindStyle(root, any_marker);
  return result;
}

absl::StatusOr<Vocabulary> Vocabulary::Load(const std::string& model_dir) {
  const std::string path = model_dir + "/tokenizer.json";
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxFileBytes));
  absl::StatusOr<Vocabulary> result = Parse(text);
  if (!result.ok()) {
    return absl::Status(result.status().code(),
                        absl::StrCat(path, ": ", result.status().message()));
  }
  return result;
}

absl::string_view Vocabulary::piece(int32_t id) const {
  if (id < 0 || id >= size()) return "";
  return entries_[id].piece;
}

bool Vocabulary::is_special(int32_t id) const {
  return id >= 0 && id < size() && entries_[id].special;
}

std::string Vocabulary::Decode(int32_t id) const {
  if (id < 0 || id >= size()) return "";
  const Entry& entry = entries_[id];
  if (entry.added) return entry.piece;
  switch (style_) {
    case Style::kByteLevel:
      return DecodeByteLevel(entry.piece);
    case Style::kSentencePiece:
      return DecodeSentencePiece(entry.piece);
    case Style::kWordPiece:
      return absl::StartsWith(entry.piece, "##") ? entry.piece.substr(2)
                                                 : absl::StrCat(" ", entry.piece);
    case Style::kPlain:
      break;
  }
  return entry.piece;
}

TokenSet Vocabulary::SentenceBoundaries(std::span<const int32_t> eos_token_ids) const {
  const TokenSet eos(eos_token_ids);
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < size(); ++id) {
    if (!is_special(id) && !eos.contains(id) && absl::EndsWith(Decode(id), "\n\n")) {
      ids.push_back(id);
    }
  }
  return TokenSet(ids);
}

TokenSet Vocabulary::WordBoundaries(std::span<const int32_t> eos_token_ids) const {
  const TokenSet eos(eos_token_ids);
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < size(); ++id) {
    const absl::string_view text = piece(id);
    if (!is_special(id) && !eos.contains(id) &&
        (absl::StartsWith(text, kByteLevelSpace) || absl::StartsWith(text, kSentencePieceSpace) ||
         absl::StartsWith(text, " "))) {
      ids.push_back(id);
    }
  }
  return TokenSet(ids);
}

std::string Vocabulary::Digest() const {
  Checksum checksum;
  for (int32_t id = 0; id < size(); ++id) {
    if (!entries_[id].given) continue;
    const std::string line = absl::StrCat(id, " ", entries_[id].piece, "\n");
    checksum.Update(line.data(), line.size());
  }
  return checksum.Hex();
}

absl::Status Vocabulary::CheckSame(const Vocabulary& senior, const Vocabulary& other,
                                   absl::string_view name) {
  const auto describe = [](const Vocabulary& vocabulary, int32_t id) -> std::string {
    if (id >= vocabulary.size()) return "no such id";
    return absl::StrCat("\"", std::string(vocabulary.piece(id)), "\"",
                        vocabulary.is_special(id) ? " (special)" : "");
  };
  for (int32_t id = 0; id < std::max(senior.size(), other.size()); ++id) {
    if (id < senior.size() && id < other.size() && senior.piece(id) == other.piece(id) &&
        senior.is_special(id) == other.is_special(id)) {
      continue;
    }
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "senior and ", name, " have different vocabularies: the first differing id is ", id,
            ", which is ", describe(senior, id), " for the senior and ", describe(other, id),
            " for the ", name)),
        reason::kVocabularyMismatch);
  }
  if (senior.style() != other.style()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "senior and ", name, " have equal pieces but different decoders")),
                      reason::kVocabularyMismatch);
  }
  return absl::OkStatus();
}

BoundarySets::BoundarySets(const Vocabulary& vocabulary, std::span<const int32_t> eos_token_ids)
    : sentence_(std::make_shared<TokenSet>(vocabulary.SentenceBoundaries(eos_token_ids))),
      word_(std::make_shared<TokenSet>(vocabulary.WordBoundaries(eos_token_ids))) {}

std::shared_ptr<const TokenSet> BoundarySets::Resolve(const TandemConfig& config) const {
  const bool sentence = config.selection_strategy == SelectionStrategy::kSentence;
  const bool word = config.selection_strategy == SelectionStrategy::kWord;
  if (!config.enabled || (!sentence && !word)) return std::make_shared<TokenSet>();
  if (!config.boundary_token_ids.empty()) {
    return std::make_shared<TokenSet>(config.boundary_token_ids);
  }
  return sentence ? sentence_ : word_;
}

}  // namespace tandem
