#include "common/rpc/security/access_control.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "common/base/errors/error.h"
#include "tandem/critic/v1/critic.pb.h"
#include "tandem/rollout/v1/rollout.pb.h"
#include "tandem/trainer/v1/trainer.pb.h"
#include "tandem/weights/v1/weights.pb.h"

namespace tandem::rpc {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

constexpr char kReader[] = "reader-reader-reader";
constexpr char kUser[] = "user-user-user-user";
constexpr char kAdmin[] = "admin-admin-admin-admin";

class AccessControlTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(testing::TempDir()) /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    options_.set_reader_file(Write("reader", kReader));
    options_.set_user_file(Write("user", kUser));
    options_.set_admin_file(Write("admin", kAdmin));
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string Write(const std::string& name, const std::string& text) const {
    const fs::path path = directory_ / name;
    std::ofstream(path) << text << "\n";
    return path;
  }
  std::unique_ptr<AccessControl> Load() {
    auto access = AccessControl::Load(options_, metrics_);
    EXPECT_TRUE(access.ok()) << access.status();
    return *std::move(access);
  }
  static std::string Bearer(const std::string& token) { return "Bearer " + token; }

  fs::path directory_;
  Metrics metrics_;
  config::v1::TokenOptions options_;
};

TEST_F(AccessControlTest, ARoleMayDoWhatTheRolesBelowItMay) {
  const auto access = Load();
  EXPECT_TRUE(access->Check(Bearer(kReader), Role::ROLE_READER).ok());
  EXPECT_TRUE(access->Check(Bearer(kUser), Role::ROLE_READER).ok());
  EXPECT_TRUE(access->Check(Bearer(kUser), Role::ROLE_USER).ok());
  EXPECT_TRUE(access->Check(Bearer(kAdmin), Role::ROLE_ADMIN).ok());
  for (const auto& [token, role] :
       {std::pair{kReader, Role::ROLE_USER}, std::pair{kReader, Role::ROLE_ADMIN},
        std::pair{kUser, Role::ROLE_ADMIN}}) {
    const absl::Status status = access->Check(Bearer(token), role);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_TRUE(HasReason(status, reason::kInsufficientRole));
  }
  EXPECT_EQ(metrics_.Counter(metric::kAuthDenials, {"insufficient_role"}).Value(), 3);
}

TEST_F(AccessControlTest, OtherTokensAreRefusedWithoutBeingQuoted) {
  const auto access = Load();
  const absl::Status missing = access->Check("", Role::ROLE_READER);
  EXPECT_EQ(missing.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(HasReason(missing, reason::kTokenMissing));
  EXPECT_TRUE(HasReason(access->Check(kAdmin, Role::ROLE_READER), reason::kTokenMissing));
  EXPECT_TRUE(HasReason(access->Check("Basic " + std::string(kAdmin), Role::ROLE_READER),
                        reason::kTokenMissing));
  for (const std::string& token : {std::string(kAdmin) + "x", std::string(kAdmin).substr(1),
                                   std::string("another-token-of-nobody"), std::string()}) {
    const absl::Status status = access->Check(Bearer(token), Role::ROLE_READER);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << token;
    EXPECT_TRUE(HasReason(status, reason::kTokenUnknown));
    if (!token.empty()) {
      EXPECT_THAT(status.ToString(), Not(HasSubstr(token)));
    }
  }
  EXPECT_EQ(metrics_.Counter(metric::kAuthDenials, {"token_missing"}).Value(), 3);
  EXPECT_EQ(metrics_.Counter(metric::kAuthDenials, {"token_unknown"}).Value(), 4);
}

TEST_F(AccessControlTest, WithoutTokenFilesEverybodyMayDoEverything) {
  EXPECT_TRUE(AccessControl(metrics_).Check("", Role::ROLE_ADMIN).ok());
  options_ = {};
  options_.set_own_file(Write("own", kAdmin));
  EXPECT_TRUE(Load()->Check("", Role::ROLE_ADMIN).ok());
}

TEST_F(AccessControlTest, TokensAreRotatedThroughAFileWithBoth) {
  const auto access = Load();
  EXPECT_FALSE(*access->Refresh());
  const std::string next = "the-next-admin-token";
  Write("admin", std::string(kAdmin) + "\n\n  " + next);
  EXPECT_TRUE(*access->Refresh());
  EXPECT_TRUE(access->Check(Bearer(kAdmin), Role::ROLE_ADMIN).ok());
  EXPECT_TRUE(access->Check(Bearer(next), Role::ROLE_ADMIN).ok());
  Write("admin", next);
  EXPECT_TRUE(*access->Refresh());
  EXPECT_FALSE(access->Check(Bearer(kAdmin), Role::ROLE_ADMIN).ok());
  EXPECT_TRUE(access->Check(Bearer(next), Role::ROLE_ADMIN).ok());
}

TEST_F(AccessControlTest, ABadFileLeavesTheEarlierTokensInUse) {
  const auto access = Load();
  Write("user", "short");
  EXPECT_EQ(FieldPath(access->Refresh().status()), "server.tokens.user_file");
  EXPECT_TRUE(access->Check(Bearer(kUser), Role::ROLE_USER).ok());
}

TEST_F(AccessControlTest, AFileMustHoldGoodTokens) {
  for (const char* text : {"", "  \n", "short", "sixteen visible characters and a space"}) {
    Write("admin", text);
    const absl::Status status = AccessControl::Load(options_, metrics_).status();
    EXPECT_EQ(FieldPath(status), "server.tokens.admin_file") << text;
    EXPECT_THAT(status.ToString(), Not(HasSubstr("visible characters and a space")));
  }
  options_.set_admin_file((directory_ / "missing").string());
  EXPECT_EQ(FieldPath(AccessControl::Load(options_, metrics_).status()),
            "server.tokens.admin_file");
}

// A new method has to say who may call it.
TEST(RequiredRoleTest, EveryMethodHasARole) {
  int num_methods = 0;
  for (const google::protobuf::FileDescriptor* file :
       {trainer::v1::TrainStepRequest::descriptor()->file(),
        rollout::v1::GenerateRequest::descriptor()->file(),
        critic::v1::TrainStepRequest::descriptor()->file(),
        weights::v1::BeginUpdateRequest::descriptor()->file()}) {
    std::set<const google::protobuf::Descriptor*> requests;
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        const google::protobuf::MethodDescriptor& method = *file->service(i)->method(j);
        EXPECT_NE(method.options().GetExtension(types::v1::required_role), Role::ROLE_UNSPECIFIED)
            << method.full_name();
        // The role is found by the request, so no two methods may share one.
        EXPECT_TRUE(requests.insert(method.input_type()).second) << method.full_name();
        ++num_methods;
      }
    }
  }
  EXPECT_GT(num_methods, 20);
}

TEST(RequiredRoleTest, IsThatOfTheMethodOfTheRequest) {
  EXPECT_EQ(RoleFor<trainer::v1::GetServerInfoRequest>(), Role::ROLE_READER);
  EXPECT_EQ(RoleFor<trainer::v1::WatchStepsRequest>(), Role::ROLE_READER);
  EXPECT_EQ(RoleFor<trainer::v1::TrainStepRequest>(), Role::ROLE_USER);
  EXPECT_EQ(RoleFor<rollout::v1::GenerateRequest>(), Role::ROLE_USER);
  EXPECT_EQ(RoleFor<critic::v1::ComputeValuesRequest>(), Role::ROLE_USER);
  EXPECT_EQ(RoleFor<trainer::v1::PublishWeightsRequest>(), Role::ROLE_ADMIN);
  EXPECT_EQ(RoleFor<trainer::v1::ExportModelRequest>(), Role::ROLE_ADMIN);
  EXPECT_EQ(RoleFor<rollout::v1::PauseRequest>(), Role::ROLE_ADMIN);
  EXPECT_EQ(RoleFor<weights::v1::CommitUpdateRequest>(), Role::ROLE_ADMIN);
  EXPECT_EQ(RequiredRole(*types::v1::ServerInfo::descriptor()), Role::ROLE_ADMIN);
}

}  // namespace
}  // namespace tandem::rpc
