// A client of a rollout server: its health, a streamed generation, scores, and errors in full.
//
//   tandem-cpp-client HOST:PORT TOKEN_ID...
//
// TLS and the token come from the environment, as for the `tandem` command: TANDEM_CA_FILE turns
// TLS on, TANDEM_CERTIFICATE_FILE and TANDEM_PRIVATE_KEY_FILE identify this client (PEM files), and
// the first line of TANDEM_TOKEN_FILE is the bearer token. Exit codes: 0 success, 1 a call failed,
// 2 wrong usage.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tandem/rollout/v1/rollout.grpc.pb.h"

namespace {

namespace health = grpc::health::v1;
namespace rollout = tandem::rollout::v1;

constexpr int kMaxTokens = 16;
constexpr auto kDeadline = std::chrono::seconds(60);

// Returns the content of the file that an environment variable names; "" if the variable is not
// set.
std::string FileNamedBy(const char* variable) {
  const char* const path = std::getenv(variable);
  if (path == nullptr || *path == '\0') return "";
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!(content << file.rdbuf())) {
    throw std::runtime_error(std::string(variable) + ": cannot read " + path);
  }
  return content.str();
}

std::int32_t TokenId(const std::string& text) {
  std::int32_t id = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, id);
  if (error != std::errc() || stop != end) {
    throw std::runtime_error("TOKEN_ID: " + text + " is no token id");
  }
  return id;
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = FileNamedBy("TANDEM_CA_FILE");
  tls.pem_cert_chain = FileNamedBy("TANDEM_CERTIFICATE_FILE");
  tls.pem_private_key = FileNamedBy("TANDEM_PRIVATE_KEY_FILE");
  const bool is_local = address.rfind("127.", 0) == 0 || address.rfind("localhost:", 0) == 0;
  if (tls.pem_root_certs.empty() && !is_local && !FileNamedBy("TANDEM_TOKEN_FILE").empty()) {
    throw std::runtime_error(
        "TANDEM_TOKEN_FILE: without TANDEM_CA_FILE the token would be sent unencrypted");
  }
  // A proxy of the environment is for the internet.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const auto credentials =
      tls.pem_root_certs.empty() ? grpc::InsecureChannelCredentials() : grpc::SslCredentials(tls);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// A call that fails after kDeadline, with the bearer token and an id by which the server's log
// lines can be found.
class Call : public grpc::ClientContext {
 public:
  explicit Call(const std::string& request_id) {
    set_deadline(std::chrono::system_clock::now() + kDeadline);
    AddMetadata("x-request-id", request_id);
    const std::string tokens = FileNamedBy("TANDEM_TOKEN_FILE");
    if (!tokens.empty()) {
      AddMetadata("authorization", "Bearer " + tokens.substr(0, tokens.find_first_of("\r\n")));
    }
  }
};

// Prints an error with what the server says about it: the field at fault (BadRequest), the stable
// name of the reason (ErrorInfo), and how long to wait where waiting helps (RetryInfo).
void PrintError(const std::string& what, const google::rpc::Status& error) {
  std::cerr << what << ": " << error.message() << " [code " << error.code();
  for (const google::protobuf::Any& detail : error.details()) {
    google::rpc::BadRequest bad_request;
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) {
        std::cerr << ", field " << violation.field();
      }
    } else if (detail.UnpackTo(&info)) {
      std::cerr << ", reason " << info.reason();
    } else if (detail.UnpackTo(&retry)) {
      std::cerr << ", retry after " << retry.retry_delay().seconds() << " s";
    }
  }
  std::cerr << "]\n";
}

// Returns whether a call succeeded; prints its error otherwise. The details of an error are a
// google.rpc.Status in the call's trailing metadata.
bool Succeeded(const std::string& what, const grpc::Status& status) {
  if (status.ok()) return true;
  google::rpc::Status error;
  if (status.error_details().empty() || !error.ParseFromString(status.error_details())) {
    error.set_code(static_cast<int>(status.error_code()));
    error.set_message(status.error_message());
  }
  PrintError(what, error);
  return false;
}

bool PrintHealth(const std::shared_ptr<grpc::Channel>& channel) {
  Call call("cpp-client-health");
  health::HealthCheckRequest request;
  request.set_service("tandem.rollout.v1.RolloutService");
  health::HealthCheckResponse reply;
  if (!Succeeded("Check", health::Health::NewStub(channel)->Check(&call, request, &reply))) {
    return false;
  }
  std::cout << "health: " << health::HealthCheckResponse::ServingStatus_Name(reply.status())
            << "\n";
  return reply.status() == health::HealthCheckResponse::SERVING;
}

bool PrintServer(rollout::RolloutService::Stub& stub) {
  Call call("cpp-client-info");
  rollout::GetServerInfoResponse info;
  if (!Succeeded("GetServerInfo", stub.GetServerInfo(&call, {}, &info))) return false;
  std::cout << "model: " << info.server().model().model_type() << ", "
            << info.server().model().num_token_ids() << " token ids, version "
            << info.server().weights().version() << "\n";
  return true;
}

// Generates one response and prints its tokens by author while they are written. Adds them to
// `ids`.
bool Generate(rollout::RolloutService::Stub& stub, std::vector<std::int32_t>& ids) {
  rollout::GenerateRequest request;
  rollout::Prompt& prompt = *request.mutable_submit()->add_prompts();
  prompt.set_request_id("prompt-0");
  prompt.mutable_prompt_token_ids()->Assign(ids.begin(), ids.end());
  prompt.mutable_sampling()->set_max_tokens(kMaxTokens);
  prompt.set_stream_tokens(true);

  Call call("cpp-client-generate");
  const auto stream = stub.Generate(&call);
  stream->Write(request);
  // No more prompts: the server ends the stream when every response is done.
  stream->WritesDone();

  bool ok = true;
  int author = -1;
  rollout::GenerateResponse event;
  while (stream->Read(&event)) {
    if (event.has_tokens()) {
      const rollout::TokensEvent& tokens = event.tokens();
      for (int i = 0; i < tokens.token_ids_size(); ++i) {
        if (tokens.authorship_mask()[i] != author) {
          author = tokens.authorship_mask()[i];
          std::cout << (author == 1 ? "[senior] " : "[junior] ");
        }
        std::cout << tokens.token_ids(i) << " " << std::flush;
      }
    } else if (event.has_finished()) {
      const auto& response = event.finished().trajectory();
      const std::string& mask = response.authorship_mask();
      std::cout << "\nresponse: " << mask.size() << " tokens, "
                << std::count(mask.begin(), mask.end(), '\1') << " by the senior\n";
      ids.insert(ids.end(), response.response_token_ids().begin(),
                 response.response_token_ids().end());
    } else if (event.has_failed()) {
      // A prompt may fail on its own; the stream goes on.
      PrintError("Generate: " + event.failed().request_id(), event.failed().status());
      ok = false;
    }
  }
  return Succeeded("Generate", stream->Finish()) && ok;
}

// Returns the sum of a FLOAT32 tensor, whose bytes are little endian.
double Sum(const tandem::types::v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(float));
  double sum = 0;
  for (const float value : values) sum += value;
  return sum;
}

// Prints the log-probabilities of all tokens but the first under senior and junior.
bool Score(rollout::RolloutService::Stub& stub, const std::vector<std::int32_t>& ids) {
  rollout::ScoreRequest request;
  rollout::ScoreSequence& sequence = *request.add_sequences();
  sequence.mutable_token_ids()->Assign(ids.begin(), ids.end());
  sequence.set_first_scored_token(1);
  request.set_senior(true);
  request.set_junior(true);

  Call call("cpp-client-score");
  rollout::ScoreResponse reply;
  if (!Succeeded("Score", stub.Score(&call, request, &reply))) return false;
  std::cout << "score: senior " << Sum(reply.sequences(0).senior_logprobs()) << ", junior "
            << Sum(reply.sequences(0).junior_logprobs()) << " nats\n";
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: tandem-cpp-client HOST:PORT TOKEN_ID...\n";
    return 2;
  }
  try {
    std::vector<std::int32_t> ids;
    for (int i = 2; i < argc; ++i) ids.push_back(TokenId(argv[i]));
    const auto channel = Connect(argv[1]);
    const auto stub = rollout::RolloutService::NewStub(channel);
    if (!PrintHealth(channel) || !PrintServer(*stub)) return 1;
    const bool generated = Generate(*stub, ids);
    const bool scored = Score(*stub, ids);
    return generated && scored ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
