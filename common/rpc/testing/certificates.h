// For tests: certificate authorities and certificates, made with OpenSSL.
#ifndef TANDEM_COMMON_RPC_TESTING_CERTIFICATES_H_
#define TANDEM_COMMON_RPC_TESTING_CERTIFICATES_H_

#include <gtest/gtest.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>

namespace tandem::rpc {

// Signs certificates for the address 127.0.0.1 and the name localhost.
class TestAuthority {
 public:
  // Writes the authority's own certificate to `directory`/ca.crt. Authorities of one file need
  // names of their own, by which OpenSSL finds them.
  explicit TestAuthority(std::filesystem::path directory,
                         const std::string& name = "test authority")
      : directory_(std::move(directory)), key_(NewKey()), certificate_(X509_new(), X509_free) {
    std::filesystem::create_directories(directory_);
    Fill(certificate_.get(), name, certificate_.get(), key_.get(), 3600);
    AddExtension(certificate_.get(), NID_basic_constraints, "critical,CA:TRUE");
    X509_sign(certificate_.get(), key_.get(), EVP_sha256());
    Write("ca.crt", certificate_.get());
  }

  std::string ca_file() const { return directory_ / "ca.crt"; }
  std::string certificate_file(const std::string& name) const {
    return directory_ / (name + ".crt");
  }
  std::string private_key_file(const std::string& name) const {
    return directory_ / (name + ".key");
  }

  // Writes `name`.crt and `name`.key, good for `seconds` from now; negative: already expired.
  // `kind` is OpenSSL's name of a kind of key without parameters; empty: ECDSA.
  void Issue(const std::string& name, int seconds = 3600, const std::string& kind = "") const {
    const Key key = kind.empty()
                        ? NewKey()
                        : Key(EVP_PKEY_Q_keygen(nullptr, nullptr, kind.c_str()), EVP_PKEY_free);
    const Certificate certificate(X509_new(), X509_free);
    Fill(certificate.get(), name, certificate_.get(), key.get(), seconds);
    AddExtension(certificate.get(), NID_subject_alt_name, "IP:127.0.0.1,DNS:localhost");
    X509_sign(certificate.get(), key_.get(), EVP_sha256());
    Write(name + ".crt", certificate.get());
    FILE* const file = std::fopen(private_key_file(name).c_str(), "w");
    EXPECT_EQ(PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr), 1);
    std::fclose(file);
  }

 private:
  using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;
  using Certificate = std::unique_ptr<X509, void (*)(X509*)>;

  static Key NewKey() { return {EVP_EC_gen("P-256"), EVP_PKEY_free}; }

  static void Fill(X509* certificate, const std::string& name, X509* issuer, EVP_PKEY* key,
                   int seconds) {
    static int serial = 0;
    X509_set_version(certificate, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -7200);
    X509_gmtime_adj(X509_getm_notAfter(certificate), seconds);
    X509_set_pubkey(certificate, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  }

  static void AddExtension(X509* certificate, int nid, const char* value) {
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, nid, value);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }

  void Write(const std::string& name, X509* certificate) const {
    FILE* const file = std::fopen((directory_ / name).c_str(), "w");
    EXPECT_EQ(PEM_write_X509(file, certificate), 1);
    std::fclose(file);
  }

  const std::filesystem::path directory_;
  const Key key_;
  const Certificate certificate_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TESTING_CERTIFICATES_H_
