#include "services/trainer/service/convert.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/coauthoring/testing/authors.h"
#include "common/rpc/convert/proto_convert.h"
#include "services/trainer/service/objective_convert.h"
#include "services/trainer/service/testing/messages.h"

namespace tandem::trainer {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(PolicyObjectiveTest, AnEmptyMessageGivesTheDocumentedDefaults) {
  const auto objective = FromProto(v1::PolicyObjective());
  ASSERT_TRUE(objective.ok()) << objective.status();
  EXPECT_EQ(objective->loss.kind, loss::PolicyLossKind::kPpoClip);
  EXPECT_EQ(objective->loss.clip_ratio_low, 0.2);
  EXPECT_EQ(objective->loss.clip_ratio_high, 0.2);
  EXPECT_EQ(objective->loss.dual_clip, 0);
  EXPECT_EQ(objective->loss.kl_coefficient, 0);
  EXPECT_EQ(objective->loss.kl_estimator, loss::KlEstimator::kK3);
  EXPECT_EQ(objective->loss.k3_cap, 0);
  EXPECT_FALSE(objective->loss.kl_importance_correction);
  EXPECT_EQ(objective->loss.entropy_coefficient, 0);
  EXPECT_EQ(objective->loss.importance_sampling_cap, 0);
  EXPECT_EQ(objective->loss.importance_sampling_floor, 0);
  EXPECT_EQ(objective->loss.importance_sampling_level, loss::ImportanceSamplingLevel::kToken);
  EXPECT_EQ(objective->loss.importance_sampling_mode, loss::ImportanceSamplingMode::kTruncate);
  EXPECT_EQ(objective->junior_token_loss_weight, 0);
  EXPECT_FALSE(objective->mask_truncated_completions);
  EXPECT_EQ(objective->old_logprobs, OldLogprobs::kSenior);
  EXPECT_EQ(objective->advantage_estimator, AdvantageEstimator::kGroupRelative);
  EXPECT_EQ(objective->std_epsilon, 1e-6);
  EXPECT_EQ(objective->scale.aggregation, loss::Aggregation::kTokenMean);
  EXPECT_EQ(objective->scale.normalizer, loss::Normalizer::kNonzeroWeight);
  EXPECT_EQ(objective->junior_kl_coefficient, 0);
  EXPECT_EQ(objective->gae_gamma, 1);
  EXPECT_EQ(objective->gae_lambda, 1);
  EXPECT_FALSE(objective->bootstrap_truncated);
  EXPECT_FALSE(objective->gae_skip_junior_tokens);
  EXPECT_FALSE(objective->whiten_advantages);
  EXPECT_EQ(objective->max_staleness, 0);
  EXPECT_EQ(objective->stale_samples, StaleSamples::kRefuse);
}

// Sets `field` to a value that is not its default; of a message, every field.
void Change(google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field) {
  using google::protobuf::FieldDescriptor;
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.SetDouble(&message, &field, 0.375);
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(&message, &field, 3);
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(&message, &field, 3);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(&message, &field, true);
    case FieldDescriptor::CPPTYPE_ENUM:
      // The last value, as the first is UNSPECIFIED and the default is often the second.
      return reflection.SetEnum(&message, &field,
                                field.enum_type()->value(field.enum_type()->value_count() - 1));
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      google::protobuf::Message& inner = *reflection.MutableMessage(&message, &field);
      for (int i = 0; i < field.message_type()->field_count(); ++i) {
        Change(inner, *field.message_type()->field(i));
      }
      return;
    }
    default:
      FAIL() << field.full_name() << ": this test does not know its type";
  }
}

// A field that the converter forgets would be ignored silently.
template <typename Objective, typename Proto>
void ExpectEveryFieldCounts(const Proto& base) {
  const Objective before = FromProto(base).value();
  const google::protobuf::Descriptor& type = *Proto::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    Proto proto = base;
    Change(proto, *type.field(i));
    const absl::StatusOr<Objective> after = FromProto(proto);
    // A refused value is not ignored either.
    EXPECT_FALSE(after.ok() && *after == before) << type.field(i)->full_name();
  }
}

TEST(ObjectiveTest, NoFieldOfTheContractIsIgnored) {
  v1::PolicyObjective base;
  ExpectEveryFieldCounts<PolicyObjective>(base);
  ExpectEveryFieldCounts<SupervisedObjective>(v1::SupervisedObjective());
}

// The objective in force has a value for every field.
TEST(PolicyObjectiveTest, EveryFieldIsSetInTheAnswer) {
  const v1::PolicyObjective proto = ToProto(FromProto(v1::PolicyObjective()).value());
  const google::protobuf::Descriptor& type = *v1::PolicyObjective::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    EXPECT_TRUE(proto.GetReflection()->HasField(proto, type.field(i)))
        << type.field(i)->full_name();
  }
  EXPECT_EQ(FromProto(proto).value(), FromProto(v1::PolicyObjective()).value());
}

// A field that ToProto forgets, or mixes up with another, comes back changed.
TEST(PolicyObjectiveTest, EveryValueComesBack) {
  using google::protobuf::FieldDescriptor;
  const google::protobuf::Descriptor& type = *v1::PolicyObjective::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const auto expect_back = [&](const v1::PolicyObjective& proto) {
      const PolicyObjective objective = FromProto(proto).value();
      const v1::PolicyObjective back = ToProto(objective);
      EXPECT_EQ(FromProto(back).value(), objective) << field.full_name();
      EXPECT_FALSE(back.SerializeAsString() ==
                   ToProto(FromProto(v1::PolicyObjective()).value()).SerializeAsString())
          << field.full_name();
    };
    v1::PolicyObjective proto;
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_ENUM) {
      Change(proto, field);
      expect_back(proto);
      continue;
    }
    const int standard =
        proto.GetReflection()->GetEnumValue(ToProto(FromProto(proto).value()), &field);
    for (int v = 1; v < field.enum_type()->value_count(); ++v) {  // 0 is UNSPECIFIED
      const int number = field.enum_type()->value(v)->number();
      proto.GetReflection()->SetEnumValue(&proto, &field, number);
      if (number != standard) expect_back(proto);
    }
  }
}

TEST(PolicyObjectiveTest, AnObjectiveIsCheckedFromItsText) {
  const auto good = ResolveObjectiveText(R"({"clip_ratio_low": 0.125})", {});
  ASSERT_TRUE(good.ok()) << good.status();
  v1::PolicyObjective proto;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(*good, &proto).ok()) << *good;
  EXPECT_EQ(proto.clip_ratio_low(), 0.125);
  EXPECT_EQ(proto.clip_ratio_high(), 0.2);
  EXPECT_EQ(proto.loss_kind(), v1::POLICY_LOSS_KIND_PPO_CLIP);
  EXPECT_EQ(good->find('\n'), std::string::npos);
  const std::pair<const char*, const char*> bad[] = {
      {"{", "policy"},
      {R"({"clip_ratio_lo": 1})", "policy.clip_ratio_lo"},
      {R"({"clip_ratio_low": 2})", "policy.clip_ratio_low"},
      {R"({"entropy_coefficient": ".nan"})", "policy.entropy_coefficient"},
      {R"({"kl_coefficient": 0.1})", "policy.kl_coefficient"},
      {"advantage_estimator: gae", "policy.advantage_estimator"}};
  for (const auto& [text, path] : bad) {
    EXPECT_EQ(FieldPath(ResolveObjectiveText(text, {}).status()), path) << text;
  }
  EXPECT_THAT(std::string(ResolveObjectiveText(bad[1].first, {}).status().message()),
              testing::HasSubstr("did you mean \"clip_ratio_low\"?"));
  EXPECT_TRUE(ResolveObjectiveText(bad[4].first, {.reference = true}).ok());
  EXPECT_TRUE(ResolveObjectiveText(bad[5].first, {.critic = true}).ok());
  config::v1::TrainerServerConfig config;
  EXPECT_FALSE(SupportOf(config).critic || SupportOf(config).reference ||
               SupportOf(config).junior || SupportOf(config).teacher);
  config.set_critic_address("host:1");
  config.set_reference_model("/models/reference");
  config.set_junior_model("/models/junior");
  config.set_teacher_model("/models/teacher");
  EXPECT_TRUE(SupportOf(config).critic && SupportOf(config).reference && SupportOf(config).junior &&
              SupportOf(config).teacher);
}

TEST(PolicyObjectiveTest, EveryFieldIsCarried) {
  v1::PolicyObjective proto;
  proto.set_loss_kind(v1::POLICY_LOSS_KIND_CISPO);
  proto.set_junior_token_loss_weight(0.25);
  proto.set_mask_truncated_completions(true);
  proto.set_clip_ratio_low(0.1);
  proto.set_clip_ratio_high(0.3);
  proto.set_dual_clip(3);
  proto.set_old_logprobs(v1::OLD_LOGPROBS_RECOMPUTED);
  proto.set_advantage_estimator(v1::ADVANTAGE_ESTIMATOR_GAE);
  proto.set_aggregation(v1::AGGREGATION_SEQ_MEAN_TOKEN_SUM_NORM);
  proto.set_normalizer(v1::NORMALIZER_ALL_TOKENS);
  proto.set_norm_constant(64);
  proto.set_kl_coefficient(0.01);
  proto.set_k3_cap(10);
  proto.set_kl_importance_correction(true);
  proto.set_entropy_coefficient(0.02);
  proto.set_importance_sampling_cap(2);
  proto.set_importance_sampling_floor(0.5);
  proto.set_off_policy_mask_threshold(0.25);
  proto.set_importance_sampling_level(v1::IMPORTANCE_SAMPLING_LEVEL_SEQUENCE);
  proto.set_importance_sampling_mode(v1::IMPORTANCE_SAMPLING_MODE_MASK);
  proto.set_junior_kl_coefficient(0.5);
  proto.set_gae_gamma(0.99);
  proto.set_gae_lambda(0.95);
  proto.set_bootstrap_truncated(true);
  proto.set_gae_skip_junior_tokens(true);
  proto.set_whiten_advantages(true);
  proto.set_max_staleness(4);
  proto.set_stale_samples(v1::STALE_SAMPLES_DROP);
  proto.set_std_epsilon(1e-4);
  proto.set_routing_replay(true);
  proto.mutable_distillation()->set_coefficient(0.75);
  proto.mutable_distillation()->set_kind(v1::DIVERGENCE_KIND_JENSEN_SHANNON);
  proto.mutable_distillation()->set_beta(0.25);
  proto.mutable_distillation()->set_top_k(16);
  proto.mutable_distillation()->set_temperature(2);
  const auto objective = FromProto(proto);
  ASSERT_TRUE(objective.ok()) << objective.status();
  EXPECT_EQ(objective->loss.kind, loss::PolicyLossKind::kCispo);
  EXPECT_EQ(objective->junior_token_loss_weight, 0.25);
  EXPECT_TRUE(objective->mask_truncated_completions);
  EXPECT_EQ(objective->loss.clip_ratio_low, 0.1);
  EXPECT_EQ(objective->loss.clip_ratio_high, 0.3);
  EXPECT_EQ(objective->loss.dual_clip, 3);
  EXPECT_EQ(objective->old_logprobs, OldLogprobs::kRecomputed);
  EXPECT_EQ(objective->advantage_estimator, AdvantageEstimator::kGae);
  EXPECT_EQ(objective->scale.aggregation, loss::Aggregation::kSeqMeanTokenSumNorm);
  EXPECT_EQ(objective->scale.normalizer, loss::Normalizer::kAllTokens);
  EXPECT_EQ(objective->scale.norm_constant, 64);
  EXPECT_EQ(objective->loss.kl_coefficient, 0.01);
  EXPECT_EQ(objective->loss.kl_estimator, loss::KlEstimator::kK3);  // the default
  EXPECT_EQ(objective->loss.k3_cap, 10);
  EXPECT_TRUE(objective->loss.kl_importance_correction);
  EXPECT_EQ(objective->loss.entropy_coefficient, 0.02);
  EXPECT_EQ(objective->loss.importance_sampling_cap, 2);
  EXPECT_EQ(objective->loss.importance_sampling_floor, 0.5);
  EXPECT_EQ(objective->loss.off_policy_mask_threshold, 0.25);
  EXPECT_EQ(objective->loss.importance_sampling_level, loss::ImportanceSamplingLevel::kSequence);
  EXPECT_EQ(objective->loss.importance_sampling_mode, loss::ImportanceSamplingMode::kMask);
  EXPECT_EQ(objective->junior_kl_coefficient, 0.5);
  EXPECT_EQ(objective->gae_gamma, 0.99);
  EXPECT_EQ(objective->gae_lambda, 0.95);
  EXPECT_TRUE(objective->bootstrap_truncated);
  EXPECT_TRUE(objective->gae_skip_junior_tokens);
  EXPECT_TRUE(objective->whiten_advantages);
  EXPECT_EQ(objective->max_staleness, 4);
  EXPECT_EQ(objective->stale_samples, StaleSamples::kDrop);
  EXPECT_EQ(objective->std_epsilon, 1e-4);
  EXPECT_TRUE(objective->routing_replay);
  EXPECT_EQ(objective->distillation,
            (DistillationOptions{
                .coefficient = 0.75,
                .divergence = {.kind = loss::DivergenceKind::kJensenShannon, .beta = 0.25},
                .top_k = 16,
                .temperature = 2}));
}

TEST(ObjectiveTest, SupervisedDistillationIsCarried) {
  v1::SupervisedObjective proto;
  EXPECT_EQ(*FromProto(proto), SupervisedObjective());
  proto.set_cross_entropy_coefficient(0);
  proto.mutable_distillation()->set_coefficient(0.5);
  proto.mutable_distillation()->set_kind(v1::DIVERGENCE_KIND_FORWARD);
  proto.mutable_distillation()->set_top_k(8);
  EXPECT_EQ(
      *FromProto(proto),
      (SupervisedObjective{.distillation = {.coefficient = 0.5,
                                            .divergence = {.kind = loss::DivergenceKind::kForward},
                                            .top_k = 8},
                           .cross_entropy_coefficient = 0}));
}

// One way to spoil a valid message, and the path that the error must name.
template <typename Proto>
struct BadCase {
  std::string path;
  std::function<void(Proto&)> spoil;
};
template <typename Proto>
void PrintTo(const BadCase<Proto>& bad, std::ostream* out) {
  *out << bad.path;
}

class BadObjectiveTest : public testing::TestWithParam<BadCase<v1::PolicyObjective>> {};

TEST_P(BadObjectiveTest, IsRefusedByName) {
  v1::PolicyObjective proto;
  GetParam().spoil(proto);
  const auto objective = FromProto(proto);
  EXPECT_EQ(objective.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(objective.status()), GetParam().path) << objective.status();
}

using P = v1::PolicyObjective;
INSTANTIATE_TEST_SUITE_P(
    All, BadObjectiveTest,
    testing::Values(
        BadCase<P>{"loss_kind", [](P& p) { p.set_loss_kind(v1::PolicyLossKind(99)); }},
        BadCase<P>{"old_logprobs", [](P& p) { p.set_old_logprobs(v1::OldLogprobs(-1)); }},
        BadCase<P>{"advantage_estimator",
                   [](P& p) { p.set_advantage_estimator(v1::AdvantageEstimator(99)); }},
        BadCase<P>{"aggregation", [](P& p) { p.set_aggregation(v1::Aggregation(99)); }},
        BadCase<P>{"normalizer", [](P& p) { p.set_normalizer(v1::Normalizer(99)); }},
        BadCase<P>{"stale_samples", [](P& p) { p.set_stale_samples(v1::StaleSamples(99)); }},
        BadCase<P>{"kl_estimator", [](P& p) { p.set_kl_estimator(v1::KlEstimator(99)); }},
        BadCase<P>{"distillation.kind",
                   [](P& p) { p.mutable_distillation()->set_kind(v1::DivergenceKind(99)); }},
        BadCase<P>{"distillation.beta", [](P& p) { p.mutable_distillation()->set_beta(0.5); }},
        BadCase<P>{"importance_sampling_level",
                   [](P& p) { p.set_importance_sampling_level(v1::ImportanceSamplingLevel(99)); }},
        BadCase<P>{"importance_sampling_mode",
                   [](P& p) { p.set_importance_sampling_mode(v1::ImportanceSamplingMode(99)); }}));

class BadHeaderTest : public testing::TestWithParam<BadCase<v1::TrainStepHeader>> {};

TEST_P(BadHeaderTest, IsRefusedByName) {
  v1::TrainStepHeader proto = PolicyHeader(1);
  GetParam().spoil(proto);
  const auto header = FromProto(proto, 8, {});
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(header.status()), GetParam().path) << header.status();
}

using H = v1::TrainStepHeader;
INSTANTIATE_TEST_SUITE_P(
    All, BadHeaderTest,
    testing::Values(
        BadCase<H>{"run_id", [](H& h) { h.clear_run_id(); }},
        BadCase<H>{"request_id", [](H& h) { h.clear_request_id(); }},
        BadCase<H>{"step", [](H& h) { h.set_step(-1); }},
        BadCase<H>{"num_samples", [](H& h) { h.set_num_samples(0); }},
        BadCase<H>{"num_samples", [](H& h) { h.set_num_samples(-7); }},
        BadCase<H>{"objective", [](H& h) { h.clear_objective(); }},
        BadCase<H>{"policy.gae_gamma", [](H& h) { h.mutable_policy()->set_gae_gamma(7); }},
        BadCase<H>{"supervised.distillation.top_k",
                   [](H& h) { h.mutable_supervised()->mutable_distillation()->set_top_k(-1); }},
        BadCase<H>{"supervised.aggregation",
                   [](H& h) { h.mutable_supervised()->set_aggregation(v1::Aggregation(42)); }}));

TEST(HeaderTest, MoreSamplesThanConfiguredIsOutOfRange) {
  const auto header = FromProto(PolicyHeader(9), 8, {});
  EXPECT_EQ(header.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldPath(header.status()), "num_samples");
}

constexpr int32_t kTopIds[] = {3, 1, 2, 5, 4, 3};
constexpr float kTopLogprobs[] = {-1, -2, -3, -1.5, -2.5, -3.5};

// Adds what a teacher says of the two tokens of a sample.
template <typename Proto>
void Teach(Proto& sample) {
  v1::TeacherTokens& teacher = *sample.mutable_teacher();
  teacher.set_name("math");
  teacher.mutable_top_token_ids()->set_dtype(types::v1::DATA_TYPE_INT32);
  teacher.mutable_top_token_ids()->set_data(kTopIds, sizeof(kTopIds));
  teacher.mutable_top_logprobs()->set_dtype(types::v1::DATA_TYPE_FLOAT32);
  teacher.mutable_top_logprobs()->set_data(kTopLogprobs, sizeof(kTopLogprobs));
  for (types::v1::Tensor* tensor :
       {teacher.mutable_top_token_ids(), teacher.mutable_top_logprobs()}) {
    tensor->add_shape(2);
    tensor->add_shape(3);
  }
}

void ExpectTaught(const TeacherTokens& teacher) {
  EXPECT_EQ(teacher.name, "math");
  EXPECT_EQ(teacher.top_tokens.count, 3);
  EXPECT_THAT(teacher.top_tokens.ids, testing::ElementsAreArray(kTopIds));
  EXPECT_THAT(teacher.top_tokens.logprobs, testing::ElementsAreArray(kTopLogprobs));
}

class BadSampleTest : public testing::TestWithParam<BadCase<v1::PolicySample>> {};

TEST_P(BadSampleTest, IsRefusedByName) {
  v1::PolicySample proto = Sample();
  ASSERT_TRUE(FromProto(proto).ok()) << FromProto(proto).status();
  GetParam().spoil(proto);
  const auto sample = FromProto(proto);
  EXPECT_EQ(sample.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(sample.status()), GetParam().path) << sample.status();
}

using S = v1::PolicySample;
constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();
INSTANTIATE_TEST_SUITE_P(
    All, BadSampleTest,
    testing::Values(
        BadCase<S>{"trajectory", [](S& s) { s.clear_trajectory(); }},
        BadCase<S>{"trajectory.authorship_mask",
                   [](S& s) { s.mutable_trajectory()->clear_authorship_mask(); }},
        BadCase<S>{"trajectory.author_logprobs",
                   [](S& s) { s.mutable_trajectory()->clear_author_logprobs(); }},
        BadCase<S>{"trajectory.senior_versions",
                   [](S& s) { s.mutable_trajectory()->clear_senior_versions(); }},
        BadCase<S>{"trajectory.author_logprobs[1]",
                   [](S& s) {
                     rpc::FloatsToProto(std::vector<float>{-1, kNanF},
                                        s.mutable_trajectory()->mutable_author_logprobs());
                   }},
        BadCase<S>{"trajectory.other_logprobs[0]",
                   [](S& s) {
                     rpc::FloatsToProto(std::vector<float>{kNanF, -1},
                                        s.mutable_trajectory()->mutable_other_logprobs());
                   }},
        BadCase<S>{"reward", [](S& s) { s.set_reward(kNan); }},
        BadCase<S>{"reward", [](S& s) { s.set_reward(-kInf); }},
        BadCase<S>{"advantages",
                   [](S& s) { rpc::FloatsToProto(std::vector<float>{1}, s.mutable_advantages()); }},
        BadCase<S>{"advantages[1]",
                   [](S& s) {
                     rpc::FloatsToProto(std::vector<float>{1, kNanF}, s.mutable_advantages());
                   }},
        BadCase<S>{"advantages.dtype", [](S& s) { s.mutable_advantages(); }},
        BadCase<S>{"teacher.top_token_ids.dtype",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->mutable_top_token_ids()->set_dtype(
                         types::v1::DATA_TYPE_FLOAT32);
                   }},
        BadCase<S>{"teacher.top_token_ids.dtype",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->clear_top_token_ids();
                   }},
        BadCase<S>{"teacher.top_token_ids.shape",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->mutable_top_token_ids()->set_shape(0, 3);
                   }},
        BadCase<S>{"teacher.top_token_ids.shape",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->mutable_top_token_ids()->set_shape(1, -3);
                   }},
        BadCase<S>{"teacher.top_token_ids.data",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->mutable_top_token_ids()->mutable_data()->pop_back();
                   }},
        BadCase<S>{"teacher.top_logprobs.dtype",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->clear_top_logprobs();
                   }},
        BadCase<S>{"teacher.top_logprobs.shape",
                   [](S& s) {
                     Teach(s);
                     s.mutable_teacher()->mutable_top_logprobs()->set_shape(1, 2);
                     s.mutable_teacher()->mutable_top_logprobs()->mutable_data()->resize(16);
                   }},
        BadCase<S>{"teacher.top_logprobs[0]",
                   [](S& s) {
                     Teach(s);
                     const float nan = kNanF;
                     s.mutable_teacher()->mutable_top_logprobs()->mutable_data()->replace(
                         0, sizeof(nan), reinterpret_cast<const char*>(&nan), sizeof(nan));
                   }},
        BadCase<S>{"old_logprobs.data",
                   [](S& s) {
                     rpc::FloatsToProto(std::vector<float>{1, 2}, s.mutable_old_logprobs());
                     s.mutable_old_logprobs()->mutable_data()->pop_back();
                   }},
        BadCase<S>{"old_logprobs.shape[0]", [](S& s) {
                     rpc::FloatsToProto(std::vector<float>{1, 2}, s.mutable_old_logprobs());
                     s.mutable_old_logprobs()->set_shape(0, -2);
                   }}));

TEST(SampleTest, IsCarried) {
  v1::PolicySample proto = Sample();
  rpc::FloatsToProto(std::vector<float>{1, -1}, proto.mutable_advantages());
  const auto sample = FromProto(proto);
  ASSERT_TRUE(sample.ok()) << sample.status();
  EXPECT_EQ(sample->group_id, "g");
  EXPECT_EQ(sample->reward, 1.0);
  EXPECT_EQ(sample->trajectory.response_token_ids, (std::vector<int32_t>{3, 4}));
  EXPECT_EQ(sample->trajectory.authorship_mask, Authors("SJ"));
  EXPECT_EQ(sample->advantages, (std::vector<float>{1, -1}));
  EXPECT_TRUE(sample->old_logprobs.empty());
  EXPECT_EQ(sample->teacher, TeacherTokens());
  Teach(proto);
  ExpectTaught(FromProto(proto)->teacher);
}

TEST(SupervisedSampleTest, WeightsAreOneForEachTokenAndFinite) {
  v1::SupervisedSample proto;
  proto.add_prompt_token_ids(1);
  proto.add_response_token_ids(2);
  proto.add_response_token_ids(3);
  EXPECT_TRUE(FromProto(proto)->weights.empty());
  rpc::FloatsToProto(std::vector<float>{0.5f, -2}, proto.mutable_weights());
  EXPECT_EQ(FromProto(proto)->weights, (std::vector<float>{0.5f, -2}));
  rpc::FloatsToProto(std::vector<float>{1, kNanF}, proto.mutable_weights());
  EXPECT_EQ(FieldPath(FromProto(proto).status()), "weights[1]");
  rpc::FloatsToProto(std::vector<float>{1}, proto.mutable_weights());
  EXPECT_EQ(FieldPath(FromProto(proto).status()), "weights");
  proto.clear_weights();
  Teach(proto);
  ExpectTaught(FromProto(proto)->teacher);
}

TEST(HeaderTest, EveryNumberOfTheOptimizerIsCarried) {
  v1::TrainStepHeader proto = PolicyHeader(1);
  EXPECT_EQ(FromProto(proto, 8, {})->optimizer, OptimizerOverrides());
  v1::OptimizerOverrides& optimizer = *proto.mutable_optimizer();
  optimizer.set_learning_rate(0.1);
  optimizer.set_beta1(0.2);
  optimizer.set_beta2(0.3);
  optimizer.set_epsilon(0.4);
  optimizer.set_weight_decay(0.5);
  optimizer.set_max_grad_norm(0.6);
  EXPECT_EQ(FromProto(proto, 8, {})->optimizer, (OptimizerOverrides{.learning_rate = 0.1,
                                                                    .beta1 = 0.2,
                                                                    .beta2 = 0.3,
                                                                    .epsilon = 0.4,
                                                                    .weight_decay = 0.5,
                                                                    .max_grad_norm = 0.6}));
}

TEST(HeaderTest, NumbersOfTheOptimizerAreCheckedByName) {
  for (const auto& [field, bad] :
       std::map<std::string, std::vector<double>>{{"learning_rate", {-1, 11, kNan}},
                                                  {"beta1", {-0.1, 1, kNan}},
                                                  {"beta2", {-0.1, 1, kNan}},
                                                  {"epsilon", {0, -1, kNan}},
                                                  {"weight_decay", {-1, kInf, kNan}},
                                                  {"max_grad_norm", {-1, kInf, kNan}}}) {
    for (const double value : bad) {
      v1::TrainStepHeader proto = PolicyHeader(1);
      v1::OptimizerOverrides& optimizer = *proto.mutable_optimizer();
      optimizer.GetReflection()->SetDouble(
          &optimizer, optimizer.GetDescriptor()->FindFieldByName(field), value);
      EXPECT_EQ(FieldPath(FromProto(proto, 8, {}).status()), "optimizer." + field) << value;
    }
  }
}

TEST(LogProbsRequestTest, AnAnswerOfTheReferenceHasNoWeights) {
  v1::ComputeLogProbsRequest proto;
  proto.add_prompt_token_ids(1);
  proto.add_response_token_ids(2);
  EXPECT_FALSE(FromProto(proto)->reference);
  proto.set_reference(true);
  EXPECT_TRUE(FromProto(proto)->reference);
  LogProbsResult result = {.logprobs = {-1}, .entropies = {1}, .weights = {}};
  EXPECT_FALSE(ToProto(result).has_weights());
  result.weights = {.version = 0, .digest = "d"};
  EXPECT_TRUE(ToProto(result).has_weights());
}

TEST(LogProbsRequestTest, TemperatureMustBePositive) {
  v1::ComputeLogProbsRequest proto;
  proto.add_prompt_token_ids(1);
  proto.add_response_token_ids(2);
  EXPECT_EQ(FromProto(proto)->temperature, 1.0);
  for (const double bad : {0.0, -1.0, kNan, kInf}) {
    proto.set_temperature(bad);
    EXPECT_EQ(FieldPath(FromProto(proto).status()), "temperature") << bad;
  }
}

}  // namespace
}  // namespace tandem::trainer
