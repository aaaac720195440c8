#include "common/coauthoring/vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

std::string ReadText(const std::string& name) {
  std::ifstream file(std::string(TANDEM_TESTDATA) + "/" + name);
  EXPECT_TRUE(file) << name;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Vocabulary Fixture(const std::string& name) { return *Vocabulary::Parse(ReadText(name + ".json")); }

// Tokenizers' own decoding is the oracle (testdata/generate.py). Half characters, which it shows as
// U+FFFD, are skipped.
void CompareWithTokenizers(const std::string& name) {
  const Vocabulary vocabulary = Fixture(name);
  const Json texts = Json::parse(ReadText(name + ".texts.json"));
  ASSERT_EQ(vocabulary.size(), static_cast<int32_t>(texts.size()));
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const std::string text = texts[id];
    if (text.find("\uFFFD") != std::string::npos) continue;
    EXPECT_EQ(vocabulary.Decode(id), text) << name << " id " << id;
  }
}

TEST(VocabularyTest, DecodesByteLevelLikeTokenizers) {
  CompareWithTokenizers("byte_level");
  EXPECT_EQ(Fixture("byte_level").style(), Vocabulary::Style::kByteLevel);
}

TEST(VocabularyTest, DecodesSentencePieceLikeTokenizers) {
  CompareWithTokenizers("sentencepiece");
  EXPECT_EQ(Fixture("sentencepiece").style(), Vocabulary::Style::kSentencePiece);
}

std::vector<std::string> Texts(const Vocabulary& vocabulary, const TokenSet& set) {
  std::vector<std::string> texts;
  for (const int32_t id : set.ids()) texts.push_back(vocabulary.Decode(id));
  return texts;
}

TEST(VocabularyTest, SentenceBoundariesEndWithABlankLine) {
  const Vocabulary bytes = Fixture("byte_level");
  // "<end>\n\n" is special; "<tag>\n\n" is an ordinary added token.
  EXPECT_THAT(Texts(bytes, bytes.SentenceBoundaries({})), ElementsAre("\n\n", "<tag>\n\n"));
  const Vocabulary pieces = Fixture("sentencepiece");
  EXPECT_THAT(Texts(pieces, pieces.SentenceBoundaries({})), ElementsAre("\n\n", ".\n\n"));
}

TEST(VocabularyTest, WordBoundariesStartWithASpaceMarker) {
  const Vocabulary bytes = Fixture("byte_level");
  for (const int32_t id : bytes.WordBoundaries({}).ids()) {
    EXPECT_EQ(bytes.Decode(id)[0], ' ') << id;
  }
  const TokenSet set = bytes.WordBoundaries({});
  for (int32_t id = 0; id < bytes.size(); ++id) {
    EXPECT_EQ(set.contains(id), !bytes.Decode(id).empty() && bytes.Decode(id)[0] == ' ') << id;
  }
  const Vocabulary pieces = Fixture("sentencepiece");
  EXPECT_THAT(Texts(pieces, pieces.WordBoundaries({})), ElementsAre(" the", " ", " a b"));
}

TEST(VocabularyTest, EosIsNeverABoundary) {
  const Vocabulary pieces = Fixture("sentencepiece");
  const int32_t blank_line = pieces.SentenceBoundaries({}).ids().front();
  EXPECT_FALSE(pieces.SentenceBoundaries({{blank_line}}).contains(blank_line));
}

TEST(VocabularyTest, EqualVocabulariesAreAccepted) {
  EXPECT_TRUE(Vocabulary::CheckSame(Fixture("byte_level"), Fixture("byte_level")).ok());
}

TEST(VocabularyTest, TheFirstDifferingIdIsNamed) {
  Json json = Json::parse(ReadText("sentencepiece.json"));
  json["model"]["vocab"][9][0] = "tha";
  json["model"]["vocab"][11][0] = "x";
  const absl::Status status =
      Vocabulary::CheckSame(Fixture("sentencepiece"), *Vocabulary::Parse(json.dump()));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reason(status), "VOCABULARY_MISMATCH");
  EXPECT_THAT(std::string(status.message()), HasSubstr("first differing id is 9"));
}

TEST(VocabularyTest, SizeAndSpecialFlagsMustAgreeToo) {
  Json shorter = Json::parse(ReadText("sentencepiece.json"));
  shorter["model"]["vocab"].erase(13);
  EXPECT_THAT(std::string(Vocabulary::CheckSame(Fixture("sentencepiece"),
                                                *Vocabulary::Parse(shorter.dump()))
                              .message()),
              HasSubstr("13"));
  Json plain = Json::parse(ReadText("sentencepiece.json"));
  plain["added_tokens"][2]["special"] = false;
  EXPECT_THAT(
      std::string(Vocabulary::CheckSame(Fixture("sentencepiece"), *Vocabulary::Parse(plain.dump()))
                      .message()),
      HasSubstr("first differing id is 2"));
}

// The numbers are testdata/generate.py's, computed with tokenizers and xxhash.
TEST(VocabularyTest, TheDigestIsThatOfTheTokenizersEntries) {
  const Json digests = Json::parse(ReadText("digests.json"));
  ASSERT_EQ(digests.size(), 2u);
  for (const auto& [name, digest] : digests.items()) {
    EXPECT_EQ(Fixture(name).Digest(), digest.get<std::string>()) << name;
  }
}

TEST(VocabularyTest, TheDigestLeavesOutIdsWithoutATokenAndTellsEqualTextApart) {
  const auto digest = [](const char* vocab) {
    return Vocabulary::Parse(std::string(R"({"model": {"vocab": )") + vocab + "}}")->Digest();
  };
  const std::string entries = "0 a\n5 b\n";
  EXPECT_EQ(digest(R"({"a": 0, "b": 5})"), Checksum().Update(entries.data(), entries.size()).Hex());
  EXPECT_NE(digest(R"({"a": 0, "b": 5})"), digest(R"({"a": 0, "b": 4})"));
  EXPECT_NE(digest(R"({"a": 0, "b": 1})"), digest(R"({"b": 0, "a": 1})"));
}

TEST(VocabularyTest, AddedTokensCountInItsSize) {
  const std::string text = ReadText("sentencepiece.json");
  const int32_t size = Vocabulary::Parse(text)->size();
  Json added = Json::parse(text);
  added["added_tokens"].push_back({{"id", size}, {"content", "<tool>"}});
  EXPECT_EQ(Vocabulary::Parse(added.dump())->size(), size + 1);
}

// As the tokenizers library, and with it every client, numbers them.
TEST(VocabularyTest, IdsOfAddedTokensCloseHoles) {
  const std::string text = ReadText("sentencepiece.json");
  const int32_t size = Vocabulary::Parse(text)->size();
  Json json = Json::parse(text);
  json["added_tokens"].push_back({{"id", size + 2}, {"content", "<tool>"}});
  json["added_tokens"].push_back({{"id", 9}, {"content", "<end>"}, {"special", true}});
  json["added_tokens"].push_back({{"id", size + 7}, {"content", "the"}});
  json["added_tokens"].push_back({{"id", size + 8}, {"content", ""}});
  json["added_tokens"].push_back({{"id", size + 9}, {"content", "<tool>"}});
  const absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Parse(json.dump());
  ASSERT_TRUE(vocabulary.ok()) << vocabulary.status();
  EXPECT_EQ(vocabulary->size(), size + 2);
  EXPECT_EQ(vocabulary->piece(size), "<tool>");
  EXPECT_EQ(vocabulary->piece(size + 1), "<end>");
  EXPECT_TRUE(vocabulary->is_special(size + 1));
  EXPECT_EQ(vocabulary->piece(9), "the");
}

TEST(VocabularyTest, AnIdForTwoTokensIsRefused) {
  absl::Status status =
      Vocabulary::Parse(R"({"model": {"vocab": {"a": 0, "b": 1, "c": 1}}})").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("token id 1 is given"));
  // The library counts the vocabulary, so that an added token can meet an id behind a hole.
  status = Vocabulary::Parse(R"({"model": {"vocab": {"a": 0, "b": 2}},
                                 "added_tokens": [{"id": 3, "content": "<c>"}]})")
               .status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("token id 2 is given to \"b\" and to \"<c>\""));
}

TEST(VocabularyTest, DamagedFilesAreRefused) {
  for (const char* text :
       {"", "[]", "{}", R"({"model": {"vocab": 3}})", R"({"model": {"vocab": {"a": -1}}})",
        R"({"model": {"vocab": {}}})", R"({"model": {"vocab": {"a": 99999999999}}})",
        R"({"model": {"vocab": [["a"], 3]}})", R"({"model": 5})"}) {
    EXPECT_EQ(Vocabulary::Parse(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(Vocabulary::Load("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(BoundarySetsTest, ConfiguredIdsReplaceTheDefault) {
  const Vocabulary pieces = Fixture("sentencepiece");
  const BoundarySets sets(pieces, {});
  TandemConfig config = {.selection_strategy = SelectionStrategy::kSentence};
  EXPECT_EQ(sets.Resolve(config)->ids(), pieces.SentenceBoundaries({}).ids());
  config.boundary_token_ids = {4};
  EXPECT_THAT(sets.Resolve(config)->ids(), ElementsAre(4));
  config = {.selection_strategy = SelectionStrategy::kWord};
  EXPECT_EQ(sets.Resolve(config)->ids(), pieces.WordBoundaries({}).ids());
  EXPECT_THAT(sets.Resolve({})->ids(), ElementsAre());
}

}  // namespace
}  // namespace tandem
