// What client.cpp, which callers use, and session.cpp, which has threads of its own, share: one attachment, and the calls
// that wait for its answers.
#pragma once

#include <grpcpp/grpcpp.h>

#include <set>

#include "client.hpp"

namespace kvtier_example {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// Makes an error like one of the daemon's.
kvtier::v1::Error error_of(kvtier::v1::Reason reason, const std::string& message);

// The call that waits for the answer to one request.
struct Client::Pending {
    std::shared_ptr<Transfer> transfer;            // the transfer of a store or load
    std::shared_ptr<std::optional<Lookup>> lookup;  // the answer goes here; if this is the last owner, nobody waits
    std::uint64_t epoch = 0;
};

// One attachment: a side connection and a stream, and what belongs to one epoch.
struct Client::Session {
    explicit Session(const std::string& socket) : side(socket) {}

    SideSocket side;
    grpc::ClientContext context;
    std::unique_ptr<kvtier::v1::Cache::Stub> stub;
    std::unique_ptr<grpc::ClientReaderWriter<kvtier::v1::AttachRequest, kvtier::v1::AttachResponse>> stream;
    std::thread reader, writer;

    bool over = false;       // nothing more is sent
    std::string why;         // why it is over, as far as the stream knows
    std::optional<kvtier::v1::Error> hello_refused;
    std::optional<kvtier::v1::Welcome> welcome;
    kvtier::v1::InstanceEvent instance;
    bool registered = false;
    bool stale = false;      // instance events from before our registration may still ask for it
    Clock::time_point next_heartbeat;
    std::uint64_t next_id = 1;
    std::deque<kvtier::v1::AttachRequest> outgoing;
    std::map<std::uint64_t, Pending> pending;
    std::map<std::uint64_t, std::shared_ptr<Transfer>> transfers;  // by ticket
    std::set<std::uint32_t> words_in_use;

    bool ready() const { return welcome && registered && instance.ready(); }
};

}  // namespace kvtier_example
