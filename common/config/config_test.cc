#include "common/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/config/flat_names.h"
#include "common/config/renamed_names.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::config {
namespace {

using v1::RolloutServerConfig;
using v1::TrainerServerConfig;

TEST(ConfigTest, ReadsNestedFieldsEnumsAndLists) {
  RolloutServerConfig config;
  ASSERT_TRUE(MergeYaml(R"(
senior_model: models/senior
max_num_seqs: 8
tandem:
  selection_strategy: word
  prob_senior: 2.5e-1
  boundary_token_ids: [1, 2]
server: {insecure: true, grpc_port: 0}
on_weight_update: keep
)",
                        &config)
                  .ok());
  EXPECT_EQ(config.senior().model(), "models/senior");
  EXPECT_EQ(config.max_num_seqs(), 8);
  EXPECT_FALSE(config.has_max_queue());
  EXPECT_EQ(config.tandem().selection_strategy(), types::v1::SELECTION_STRATEGY_WORD);
  EXPECT_EQ(config.tandem().prob_senior(), 0.25);
  ASSERT_EQ(config.tandem().boundary_token_ids_size(), 2);
  EXPECT_TRUE(config.server().insecure());
  EXPECT_TRUE(config.server().has_grpc_port());
  EXPECT_EQ(config.on_weight_update(), v1::ON_WEIGHT_UPDATE_KEEP);
}

TEST(ConfigTest, EmptyDocumentsAndEmptyValuesChangeNothing) {
  RolloutServerConfig config;
  config.set_max_queue(3);
  EXPECT_TRUE(MergeYaml("", &config).ok());
  EXPECT_TRUE(MergeYaml("# nothing\nserver:\nmax_queue: ~\n", &config).ok());
  EXPECT_EQ(config.max_queue(), 3);
}

struct BadYaml {
  const char* yaml;
  const char* path;
  const char* text;  // in the message
};

class BadYamlTest : public testing::TestWithParam<BadYaml> {};

TEST_P(BadYamlTest, IsRefusedWithThePath) {
  RolloutServerConfig config;
  const absl::Status status = MergeYaml(GetParam().yaml, &config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(FieldPath(status).value_or(""), GetParam().path) << status;
  EXPECT_NE(status.message().find(GetParam().text), absl::string_view::npos) << status;
}

INSTANTIATE_TEST_SUITE_P(
    All, BadYamlTest,
    testing::Values(
        BadYaml{"tandem: {prob_senor: 1}", "tandem.prob_senor", "did you mean \"prob_senior\"?"},
        BadYaml{"xyzzy: 1", "xyzzy", "known: server, compute"},
        BadYaml{"max_queue: many", "max_queue", "expected an integer, got many"},
        BadYaml{"max_queue: 1.5", "max_queue", "expected an integer"},
        BadYaml{"max_queue: 5000000000", "max_queue", "2147483647"},
        BadYaml{"max_queue: \"5\"", "max_queue", "the text \"5\""},
        BadYaml{"max_queue: [5]", "max_queue", "a list"},
        BadYaml{"server: 5", "server", "expected a map"},
        BadYaml{"server: {insecure: yes}", "server.insecure", "true or false"},
        BadYaml{"server: {drain_seconds: .nan}", "server.drain_seconds", "a number"},
        BadYaml{"tandem: {selection_strategy: words}", "tandem.selection_strategy",
                "did you mean \"word\"?"},
        BadYaml{"tandem: {selection_strategy: unspecified}", "tandem.selection_strategy", "known"},
        BadYaml{"tandem: {boundary_token_ids: 3}", "tandem.boundary_token_ids", "a list"},
        BadYaml{"tandem: {boundary_token_ids: [1, x]}", "tandem.boundary_token_ids[1]", "integer"},
        BadYaml{"senior_model: \"a\xd8\"", "senior_model", "UTF-8"},
        BadYaml{"senior_model: \"\xe2\x96\"", "senior_model", "UTF-8"},
        BadYaml{"senior_model: \"\xed\xa0\x80\"", "senior_model", "UTF-8"},
        BadYaml{"senior_model: \"\xc0\xaf\"", "senior_model", "UTF-8"},
        BadYaml{"max_queue: 1\nmax_model_len: 9\nmax_queue: 2", "max_queue",
                "duplicate key, in lines 1 and 3"},
        BadYaml{"- 1\n- 2", "config", "expected a map"}, BadYaml{"a: [", "", "YAML: line 1"},
        BadYaml{"--- {}\n--- {}\n", "", "more than one"}));

TEST(ConfigTest, TextMayBeAnyUtf8) {
  RolloutServerConfig config;
  EXPECT_TRUE(MergeYaml("senior_model: \"ü ✓ \xf0\x9f\x98\x80\"", &config).ok());
}

TEST(ConfigTest, DeepDocumentsAreRefused) {
  RolloutServerConfig config;
  EXPECT_FALSE(MergeYaml(std::string(100000, '['), &config).ok());
  EXPECT_FALSE(MergeYaml(std::string(100000, '-'), &config).ok());
  std::string spaced;
  for (int i = 0; i < 50000; ++i) spaced += "- ";
  EXPECT_FALSE(MergeYaml(spaced, &config).ok());
}

TEST(ConfigTest, OverridesWinInOrder) {
  TrainerServerConfig config;
  ASSERT_TRUE(Load({.overrides = {"optimizer.learning_rate=1e-5", "optimizer.learning_rate=2e-5",
                                  "optimizer.schedule=cosine", "model=a=b"}},
                   &config)
                  .ok());
  EXPECT_EQ(config.optimizer().learning_rate(), 2e-5);
  EXPECT_EQ(config.optimizer().schedule(), v1::LEARNING_RATE_SCHEDULE_COSINE);
  EXPECT_EQ(config.model(), "a=b");
}

TEST(ConfigTest, VariablesStandBetweenTheFileAndTheOverrides) {
  const std::string file = testing::TempDir() + "/variables.yaml";
  std::ofstream(file) << "model: file\nmax_samples: 1\nmax_model_len: 1\n";
  TrainerServerConfig config;
  ASSERT_TRUE(Load({.file = file,
                    .variables = {"PATH=/bin", "TANDEM_CONFIG=x", "TANDEM__MAX_SAMPLES=2",
                                  "TANDEM__MAX_MODEL_LEN=2", "TANDEM__OPTIMIZER__BETA1=0.5",
                                  "TANDEM__FREEZE=[a=b, c]"},
                    .overrides = {"max_model_len=3"}},
                   &config)
                  .ok());
  EXPECT_EQ(config.model(), "file");
  EXPECT_EQ(config.max_samples(), 2);
  EXPECT_EQ(config.max_model_len(), 3);
  EXPECT_EQ(config.optimizer().beta1(), 0.5);
  EXPECT_THAT(config.freeze(), testing::ElementsAre("a=b", "c"));
}

TEST(ConfigTest, BadVariablesAreNamed) {
  TrainerServerConfig config;
  const absl::Status unknown = ApplyVariable("TANDEM__OPTIMISER__BETA1=1", &config);
  EXPECT_EQ(FieldPath(unknown), "optimiser");
  EXPECT_THAT(std::string(unknown.message()), testing::StartsWith("TANDEM__OPTIMISER__BETA1: "));
  EXPECT_EQ(FieldPath(ApplyVariable("TANDEM__MAX_SAMPLES=many", &config)), "max_samples");
  EXPECT_FALSE(ApplyVariable("TANDEM__=1", &config).ok());
}

TEST(ConfigTest, OverrideOfAListReplacesIt) {
  RolloutServerConfig config;
  ASSERT_TRUE(ApplyOverride("tandem.boundary_token_ids=[1,2]", &config).ok());
  ASSERT_TRUE(ApplyOverride("tandem.boundary_token_ids=[7]", &config).ok());
  ASSERT_EQ(config.tandem().boundary_token_ids_size(), 1);
  EXPECT_EQ(config.tandem().boundary_token_ids(0), 7);
}

TEST(ConfigTest, TextOfAnOverrideIsTextWhateverYamlMakesOfIt) {
  for (const std::string text :
       {"::", "::1", "[::1]", "a: b", "{x}", "[a", "0.0.0.0", "C:\\x: y"}) {
    RolloutServerConfig config;
    EXPECT_TRUE(ApplyOverride(absl::StrCat("server.host=", text), &config).ok()) << text;
    EXPECT_EQ(config.server().host(), text);
  }
  RolloutServerConfig config;
  EXPECT_TRUE(ApplyOverride("server.host=\"::\"", &config).ok());
  EXPECT_EQ(config.server().host(), "::");
}

TEST(ConfigTest, BadOverridesNameThePath) {
  TrainerServerConfig config;
  EXPECT_EQ(FieldPath(ApplyOverride("optimiser.beta1=1", &config)), "optimiser");
  EXPECT_EQ(FieldPath(ApplyOverride("optimizer.beta3=1", &config)), "optimizer.beta3");
  EXPECT_EQ(FieldPath(ApplyOverride("optimizer.beta1.x=1", &config)), "optimizer.beta1");
  EXPECT_EQ(FieldPath(ApplyOverride("optimizer.beta1=big", &config)), "optimizer.beta1");
  EXPECT_FALSE(ApplyOverride("optimizer.beta1", &config).ok());
}

TEST(ConfigTest, AnOldNameIsRefusedWithTheNewOne) {
  for (const RenamedName& name : kRenamedNames) {
    const std::string key(name.old_name);
    const std::string advice = absl::StrCat(key, " is now ", name.new_name);
    RolloutServerConfig config;
    for (const std::string& yaml :
         {absl::StrCat(key, ": 1"), absl::StrCat("tandem: {", key, ": 1}")}) {
      const absl::Status status = MergeYaml(yaml, &config);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(advice)) << yaml;
    }
    for (const std::string& path :
         {key, absl::StrCat("tandem.", key), absl::StrCat("actor_rollout_ref.actor.", key)}) {
      const absl::Status status = ApplyOverride(absl::StrCat(path, "=1"), &config);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(advice)) << path;
    }
  }
  RolloutServerConfig config;
  const absl::Status status = ApplyVariable("TANDEM__FROZEN_DTYPE=bfloat16", &config);
  EXPECT_EQ(FieldPath(status), "frozen_dtype");
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("frozen_dtype is now junior_dtype"));
}

// A value that the type of a setting takes.
std::string ValueOf(const google::protobuf::FieldDescriptor& field) {
  using google::protobuf::FieldDescriptor;
  if (field.is_repeated()) return "[1]";
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) return "true";
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_ENUM) return "int8";
  return "1";
}

TEST(ConfigTest, AFlatNameSetsTheFieldOfTheLane) {
  for (const FlatName& name : kFlatNames) {
    RolloutServerConfig nested;
    const auto* const section =
        RolloutServerConfig::descriptor()->FindFieldByName(std::string(name.section));
    ASSERT_NE(section, nullptr) << name.flat;
    const auto* const field = section->message_type()->FindFieldByName(std::string(name.field));
    ASSERT_NE(field, nullptr) << name.flat;
    const std::string value = ValueOf(*field);
    const std::string path = absl::StrCat(name.section, ".", name.field);
    ASSERT_TRUE(ApplyOverride(absl::StrCat(path, "=", value), &nested).ok()) << path;
    RolloutServerConfig of_override, of_yaml, of_variable;
    ASSERT_TRUE(ApplyOverride(absl::StrCat(name.flat, "=", value), &of_override).ok());
    ASSERT_TRUE(MergeYaml(absl::StrCat(name.flat, ": ", value), &of_yaml).ok());
    ASSERT_TRUE(
        ApplyVariable(absl::StrCat("TANDEM__", absl::AsciiStrToUpper(name.flat), "=", value),
                      &of_variable)
            .ok());
    for (const RolloutServerConfig& config : {of_override, of_yaml, of_variable}) {
      EXPECT_EQ(config.SerializeAsString(), nested.SerializeAsString()) << name.flat;
    }
  }
}

TEST(ConfigTest, OneSourceHasOneNameOfASetting) {
  for (const FlatName& name : kFlatNames) {
    const std::string path = absl::StrCat(name.section, ".", name.field);
    RolloutServerConfig config;
    const absl::Status in_file = MergeYaml(
        absl::StrCat(name.flat, ": 1\n", name.section, ": {", name.field, ": 1}"), &config);
    EXPECT_EQ(FieldPath(in_file), name.flat);
    EXPECT_THAT(std::string(in_file.message()),
                testing::HasSubstr(absl::StrCat("is also given as ", path)));
    const std::string flat = absl::AsciiStrToUpper(name.flat);
    const absl::Status in_variables =
        Load({.variables = {absl::StrCat("TANDEM__", flat, "=1"),
                            absl::StrCat("TANDEM__", absl::AsciiStrToUpper(name.section), "__",
                                         absl::AsciiStrToUpper(name.field), "=1")}},
             &config);
    EXPECT_EQ(FieldPath(in_variables), name.flat);
    EXPECT_THAT(std::string(in_variables.message()), testing::HasSubstr(path));
  }
  RolloutServerConfig config;
  const absl::Status status = MergeYaml("senior_dtype: a\nsenior: {dtype: a}", &config);
  EXPECT_EQ(FieldPath(status), "senior_dtype");
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("is also given as senior.dtype"));
  EXPECT_EQ(FieldPath(MergeYaml("junior_dtype: a\njunior_dtype: b", &config)), "junior_dtype");
  EXPECT_TRUE(MergeYaml("senior_dtype: a\nsenior: {dtype: }", &config).ok());
}

TEST(ConfigTest, ALaterSourceWinsUnderEitherName) {
  const std::string file = testing::TempDir() + "/lanes.yaml";
  std::ofstream(file) << "senior_dtype: file\njunior: {dtype: file}\n";
  RolloutServerConfig config;
  ASSERT_TRUE(
      Load({.file = file, .overrides = {"senior.dtype=b", "junior_dtype=b"}}, &config).ok());
  EXPECT_EQ(config.senior().dtype(), "b");
  EXPECT_EQ(config.junior().dtype(), "b");
}

TEST(ConfigTest, AServerWithoutLanesHasNoFlatNames) {
  TrainerServerConfig config;
  EXPECT_FALSE(MergeYaml("senior_dtype: float32", &config).ok());
  ASSERT_TRUE(MergeYaml("junior_model: j\nmax_model_len: 7", &config).ok());
  EXPECT_EQ(config.junior_model(), "j");
  EXPECT_EQ(config.max_model_len(), 7);
}

TEST(ConfigTest, AnErrorRepeatsTheNameThatTheSourceUses) {
  const std::string file = testing::TempDir() + "/flat.yaml";
  std::ofstream(file) << "junior_gpu_devices: [0]\nsenior: {dtype: x}\n";
  const Sources sources{.file = file,
                        .variables = {"TANDEM__MAX_MODEL_LEN=1"},
                        .overrides = {"senior_quantization=int4", "senior_model=m"}};
  const auto named = [&](const std::string& path) {
    const absl::Status status = NameAsWritten(sources, InvalidField(path, "is wrong"));
    EXPECT_EQ(status.message(), absl::StrCat(FieldPath(status).value_or(""), ": is wrong"));
    return FieldPath(status).value_or("");
  };
  EXPECT_EQ(named("junior.gpu_devices[1]"), "junior_gpu_devices[1]");
  EXPECT_EQ(named("senior.max_model_len"), "max_model_len");
  EXPECT_EQ(named("senior.quantization"), "senior_quantization");
  EXPECT_EQ(named("senior.model.config.json"), "senior_model.config.json");
  EXPECT_EQ(named("senior.model_revision"), "senior.model_revision");
  EXPECT_EQ(named("senior.dtype"), "senior.dtype");
  EXPECT_EQ(named("junior.dtype"), "junior.dtype");
  EXPECT_EQ(named("server.host"), "server.host");
}

TEST(ConfigTest, ErrorsOfAFileNameIt) {
  TrainerServerConfig config;
  EXPECT_EQ(MergeYamlFile("/no/such.yaml", &config).code(), absl::StatusCode::kNotFound);
  const std::string path = testing::TempDir() + "/bad.yaml";
  std::ofstream(path) << "optimizer:\n  beta3: 1\n";
  const absl::Status status = MergeYamlFile(path, &config);
  EXPECT_EQ(FieldPath(status), "optimizer.beta3");
  EXPECT_NE(status.message().find(path), absl::string_view::npos);
}

TEST(ConfigTest, YamlReadsBack) {
  RolloutServerConfig config;
  config.mutable_senior()->set_model("a: \"quoted\" #path");
  config.mutable_server()->set_drain_seconds(1e-7);
  config.mutable_tandem()->set_selection_strategy(types::v1::SELECTION_STRATEGY_CHUNK);
  config.mutable_tandem()->add_boundary_token_ids(4);
  config.mutable_tandem()->add_boundary_token_ids(5);
  const std::string yaml = ToYaml(config);
  EXPECT_NE(yaml.find("selection_strategy: chunk\n"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("drain_seconds: 1.0e-07"), std::string::npos) << yaml;
  RolloutServerConfig again;
  ASSERT_TRUE(MergeYaml(yaml, &again).ok()) << yaml;
  EXPECT_EQ(again.SerializeAsString(), config.SerializeAsString());
  EXPECT_EQ(ToYaml(again), yaml);
}

}  // namespace
}  // namespace tandem::config
