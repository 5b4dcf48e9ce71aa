// The session: attaching, registering, the stream, and what happens when it is lost.
#include "session.hpp"

#include <poll.h>

#include <algorithm>
#include <random>

namespace kvtier_example {

namespace v1 = kvtier::v1;

namespace {

constexpr Milliseconds kOpen{2'000}, kHello{5'000}, kRegister{75'000};
constexpr Milliseconds kBackoffFirst{50}, kBackoffMost{2'000}, kRetry{100};

}  // namespace

void Client::run() {
    std::mt19937 random{std::random_device{}()};
    Milliseconds backoff = kBackoffFirst;
    for (;;) {
        std::shared_ptr<Session> session;
        const auto began = Clock::now();
        std::string why = "the client is closing";
        try {
            session = std::make_shared<Session>(options_.socket);
            attach(*session);
            {
                Lock lock(mutex_);
                session_ = session;
            }
            serve(*session);
        } catch (const std::exception& error) {  // Lost, Refused, or no memory for a page
            why = error.what();
        }
        if (session) lose(*session, why);
        Lock lock(mutex_);
        last_error_ = why;
        if (Clock::now() - began > std::chrono::seconds(1)) backoff = kBackoffFirst;
        const Milliseconds wait(std::uniform_int_distribution<long>(backoff.count() / 2, backoff.count())(random));
        backoff = std::min(backoff * 2, kBackoffMost);
        if (changed_.wait_for(lock, wait, [this] { return closing_; })) return;
    }
}

void Client::attach(Session& session) {
    v1::SideRequest open;
    open.mutable_open()->add_protocol_versions(1);
    std::vector<Fd> none;
    const auto opened = session.side.call(open, -1, 0, none, kOpen, [] {}).opened();

    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    session.stub = v1::Cache::NewStub(
        grpc::CreateCustomChannel("unix:" + options_.socket, grpc::InsecureChannelCredentials(), arguments));
    session.stream = session.stub->Attach(&session.context);

    v1::AttachRequest request;
    v1::Hello& hello = *request.mutable_hello();
    hello.add_protocol_versions(1);
    hello.set_token(opened.token());
    hello.set_instance(options_.instance);
    hello.set_role(v1::ROLE_SCHEDULER_AND_RANK);
    hello.set_world_size(1);
    *hello.mutable_namespace_() = options_.name_space;
    hello.set_client("kvtier example client in C++");
    v1::Group& group = *hello.add_groups();
    group.set_kind(v1::GROUP_KIND_FULL_ATTENTION);
    group.set_block_tokens(options_.block_tokens);
    for (const Plane& plane : options_.planes) {
        v1::PlaneGeometry& geometry = *group.add_planes();
        geometry.set_fragment_bytes(plane.fragment_bytes);
        geometry.set_description(plane.description);
    }

    Lock lock(mutex_);
    session.reader = std::thread([this, &session] { read(session); });
    session.writer = std::thread([this, &session] { write(session); });
    send(session, std::move(request), {});
    changed_.wait_for(lock, kHello, [&] {
        return session.welcome || session.hello_refused || !session.why.empty() || closing_;
    });
    if (session.hello_refused) throw Refused(*session.hello_refused);
    if (!session.welcome) throw Lost(session.why.empty() ? "no Welcome in time" : session.why);
    session.next_heartbeat = Clock::now();
}

// Sends heartbeats, registers, and watches the side socket, until the session is over.
void Client::serve(Session& session) {
    auto retry = Clock::now();
    for (;;) {
        bool wanted = false;
        {
            Lock lock(mutex_);
            heartbeat(session);
            reap();
            // Wait until all that was submitted has ended: it may be on its way, and would run on the new page.
            wanted = !session.registered && session.transfers.empty() && Clock::now() >= retry;
        }
        if (wanted) {
            try {
                register_all(session);
            } catch (const Refused& refused) {
                // The copy worker is being replaced.
                if (refused.reason() != v1::REASON_WORKER_UNAVAILABLE) throw;
                retry = Clock::now() + kRetry;
            }
        }
        pollfd side{session.side.fd(), POLLIN, 0};  // the daemon sends nothing there unasked, so it has closed the socket
        if (poll(&side, 1, 0) > 0) throw Lost("the daemon closed the side socket");
        Lock lock(mutex_);
        changed_.wait_for(lock, Milliseconds(20));
    }
}

// Sends a heartbeat if one is due. Throws Lost if the session is over.
void Client::heartbeat(Session& session) {
    if (closing_) throw Lost("the client is closing");
    if (!session.why.empty()) throw Lost(session.why);
    if (!session.welcome || Clock::now() < session.next_heartbeat) return;
    session.next_heartbeat = Clock::now() + Milliseconds(session.welcome->limits().heartbeat_interval_ms());
    v1::AttachRequest request;
    request.mutable_heartbeat();
    send(session, std::move(request), {});
}

// Registers words, then memory, with a new page.
void Client::register_all(Session& session) {
    const auto meanwhile = [&] {
        Lock lock(mutex_);
        heartbeat(session);
    };
    auto page = std::make_shared<WordsPage>(options_.doorbells, options_.parts);
    {
        Lock lock(mutex_);
        if (page_) past_.push_back(std::move(page_));
        page_.reset();
        for (std::uint32_t i = 0; i < options_.doorbells; ++i) page->ring(i, rung_[i]);
        reap();
    }
    v1::SideRequest words;
    words.mutable_register_words()->set_doorbells(options_.doorbells);
    words.mutable_register_words()->set_parts(options_.parts);
    std::vector<Fd> worker, none;
    session.side.call(words, page->fd(), 1, worker, kRegister, meanwhile);
    page->adopt_worker(std::move(worker.front()));
    {
        // From here on the worker may have the page, so it has to be fenced whatever becomes of the rest.
        Lock lock(mutex_);
        for (std::uint32_t i = 0; i < options_.doorbells; ++i) page->ring(i, rung_[i]);
        page_ = page;
    }

    v1::SideRequest memory;
    v1::RegisterMemory& registration = *memory.mutable_register_memory();
    registration.set_mapping_bytes(memory_.bytes());
    v1::GroupMemory& group = *registration.add_groups();
    group.set_num_blocks(options_.num_blocks);
    for (const Plane& plane : options_.planes) {
        v1::Plane& place = *group.add_planes();
        place.set_base_offset(plane.base_offset);
        place.set_block_stride_bytes(plane.block_stride_bytes);
    }
    session.side.call(memory, memory_.fd(), 0, none, kRegister, meanwhile);
    Lock lock(mutex_);
    session.registered = true;
    session.stale = session.instance.reregister_ranks_size() > 0;
    changed_.notify_all();
}

// Ends the session: first of all, so that nobody waits any more, and nothing can start.
void Client::lose(Session& session, const std::string& why) {
    {
        Lock lock(mutex_);
        session.over = true;
        session_.reset();
        if (page_) past_.push_back(std::move(page_));
        page_.reset();
        reap();
        for (auto& [id, pending] : session.pending)
            if (pending.lookup) *pending.lookup = Lookup{.error = error_of(v1::REASON_NOT_ATTACHED, why)};
        for (auto& [ticket, transfer] : session.transfers) {
            transfer->lost = true;
            transfer->error = error_of(v1::REASON_EPOCH_ENDED, why);
        }
        session.pending.clear();
        session.transfers.clear();
        changed_.notify_all();
    }
    session.context.TryCancel();
    if (session.reader.joinable()) session.reader.join();
    if (session.writer.joinable()) session.writer.join();
    if (session.stream) session.stream->Finish();
}  // the session's owner closes the side socket

// Seals replaced pages, and forgets those that are fenced. Transfers that may still be asked for keep their own pages.
void Client::reap() {
    for (auto& page : past_) page->seal();
    std::erase_if(past_, [](auto& page) { return page->fenced(); });
}

// --- the stream's threads ---

void Client::read(Session& session) {
    v1::AttachResponse message;
    while (session.stream->Read(&message)) {
        Lock lock(mutex_);
        if (session.over) break;
        take(session, message);
        changed_.notify_all();
    }
    Lock lock(mutex_);
    if (session.why.empty()) session.why = "the daemon closed the stream";
    changed_.notify_all();
}

void Client::write(Session& session) {
    Lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return session.over || !session.outgoing.empty(); });
        if (session.over) return;
        const v1::AttachRequest request = std::move(session.outgoing.front());
        session.outgoing.pop_front();
        lock.unlock();
        if (!session.stream->Write(request)) return;  // the reader notices that, too
        lock.lock();
    }
}

void Client::take(Session& session, const v1::AttachResponse& message) {
    Pending pending;
    if (auto found = session.pending.find(message.id()); message.id() != 0 && found != session.pending.end()) {
        pending = std::move(found->second);
        session.pending.erase(found);
    }
    switch (message.body_case()) {
        case v1::AttachResponse::kWelcome:
            session.welcome = message.welcome();
            session.instance = message.welcome().instance();
            break;
        case v1::AttachResponse::kLookup: {
            const v1::LookupResponse& response = message.lookup();
            if (!pending.lookup || response.answers_size() != 1) break;
            Lookup answer{.hits = response.answers(0).hits(), .states = response.answers(0).states()};
            if (response.lease_id() != 0) answer.lease = Lease{response.lease_id(), pending.epoch, answer.hits};
            if (response.has_lease_refused()) answer.error = response.lease_refused();
            if (answer.lease && pending.lookup.use_count() == 1) {  // the lookup was given up, so nobody would load it
                v1::AttachRequest request;
                request.mutable_release()->add_lease_ids(answer.lease->id);
                send(session, std::move(request), {});
            }
            *pending.lookup = std::move(answer);
            break;
        }
        case v1::AttachResponse::kSubmit:  // the transfer's event may have come earlier
            if (pending.transfer) pending.transfer->results = message.submit().results();
            break;
        case v1::AttachResponse::kTransfer: {
            const auto found = session.transfers.find(message.transfer().ticket());
            if (found == session.transfers.end()) break;
            session.words_in_use.erase(found->second->part_word);
            end(*found->second, message.transfer());
            session.transfers.erase(found);
            break;
        }
        case v1::AttachResponse::kError:
            last_error_ = Refused::text_of(message.error());
            if (!session.welcome) {
                session.hello_refused = message.error();
            } else if (pending.lookup) {
                *pending.lookup = Lookup{.error = message.error()};
            } else if (pending.transfer && message.error().reason() == v1::REASON_INTERNAL) {
                session.why = last_error_;  // this is no refusal: parts may be under way
            } else if (pending.transfer) {
                session.words_in_use.erase(pending.transfer->part_word);
                session.transfers.erase(pending.transfer->ticket);
                refuse(*pending.transfer, message.error());
            }
            break;
        case v1::AttachResponse::kInstance: {
            session.instance = message.instance();
            const bool asked = message.instance().reregister_ranks_size() > 0;
            if (!asked)
                session.stale = false;
            else if (!session.stale)
                session.registered = false;  // our copy worker was lost
            break;
        }
        case v1::AttachResponse::kGoodbye:
            session.why = "the daemon ended the session: " + Refused::text_of(message.goodbye().why());
            break;
        default:  // heartbeat_ack and the like, and what only a newer daemon says
            break;
    }
}

}  // namespace kvtier_example
