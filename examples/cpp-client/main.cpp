// A program around the client: it reads one command per line, and answers each with one line.
//
//   kvtier-client SOCKET INSTANCE [TENANT]
//
// Its cache has 64 blocks of three planes, block after block in memory with gaps between them. Hashes are 64 hexadecimal
// digits; FILE holds the bytes of blocks as they are stored, one block after another.
//
//   ready SECONDS            waits until stores and loads work
//   identity                 tells the layout fingerprint and the namespace digest
//   read FILE FIRST          fills blocks from FIRST on
//   write FILE FIRST COUNT   writes blocks to a file
//   wipe                     overwrites the whole cache
//   store FIRST HASH...      stores blocks from FIRST on
//   gated-store FIRST HASH   the same, submitted before its doorbell is rung
//   revoked-store FIRST HASH submits a store behind a doorbell, and revokes it
//   lookup HASH...           tells what could be loaded
//   load FIRST HASH...       looks up with a lease, and loads what hits to the blocks from FIRST on
//   lease HASH...            looks up with a lease and keeps it
//   load-leased FIRST        loads what that lease holds, whatever has happened meanwhile
//   start-store FIRST HASH...  submits a store, and answers as soon as its copy runs
//   start-load FIRST HASH...   submits a load, and answers as soon as its copy runs
//   revoke                     revokes what was started in this way
//   outcome                    waits for its end
//   twice HASH HASH          tries to load one block to one place twice, which is refused
//   roundtrip COUNT          stores COUNT blocks of random bytes, loads them back and compares every byte
//   churn SECONDS COUNT      as many round trips as there is time for; tells how many were whole, and how many failed
//   quit
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <numeric>
#include <random>
#include <sstream>

#include "client.hpp"

namespace {

using namespace kvtier_example;

constexpr std::uint64_t kBlocks = 64;
constexpr std::uint64_t kStride = 5'248;  // more than a block's 5,160 bytes, with unused bytes between
constexpr std::byte kWiped{0x3f};
constexpr Milliseconds kTransfer{60'000};

const std::vector<Plane> kPlanes = {
    {4'096, 64, kStride, "keys"}, {1'000, 64 + 4'096, kStride, "values"}, {64, 64 + 5'096, kStride, "scales"}};
constexpr std::uint64_t kBlockBytes = 4'096 + 1'000 + 64;
constexpr std::uint64_t kMemoryBytes = 64 + kBlocks * kStride;

Options options_of(const std::string& socket, const std::string& instance, const std::string& tenant) {
    Options options{.socket = socket, .instance = instance, .num_blocks = kBlocks, .planes = kPlanes};
    options.name_space.set_model("examples/three-planes");
    options.name_space.set_kv_dtype("uint8");
    options.name_space.set_hash_scheme("examples:any");
    options.name_space.set_hash_bytes(32);
    options.name_space.set_tenant(tenant);
    return options;
}

std::string hash_of(const std::string& hex) {
    if (hex.size() != 64) throw std::invalid_argument("a hash has 64 hexadecimal digits: " + hex);
    std::string hash;
    for (std::size_t at = 0; at < hex.size(); at += 2)
        hash.push_back(static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16)));
    return hash;
}

std::vector<std::string> hashes_of(std::istringstream& words) {
    std::vector<std::string> hashes;
    for (std::string hex; words >> hex;) hashes.push_back(hash_of(hex));
    return hashes;
}

std::vector<std::uint32_t> range(std::uint32_t first, std::size_t count) {
    std::vector<std::uint32_t> ids(count);
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

std::string digits(const std::string& bytes) {
    std::string text;
    for (const char byte : bytes) text += static_cast<char>('0' + byte);
    return text.empty() ? "-" : text;
}

class Program {
   public:
    Program(const std::string& socket, const std::string& instance, const std::string& tenant)
        : memory_("kvtier-example", kMemoryBytes), client_(options_of(socket, instance, tenant), memory_) {}

    std::string run(const std::string& command, std::istringstream& words) {
        if (command == "ready") return ready(number(words));
        if (command == "identity") return client_.identity().first + " " + client_.identity().second;
        if (command == "read") {
            const std::string file = word(words);
            return read(file, number(words));
        }
        if (command == "write") {
            const std::string file = word(words);
            const std::uint32_t first = number(words);
            return write(file, first, number(words));
        }
        if (command == "wipe") return wipe();
        if (command == "store") {
            const std::uint32_t first = number(words);
            const auto hashes = hashes_of(words);
            return told(*client_.store(hashes, range(first, hashes.size())));
        }
        if (command == "gated-store" || command == "revoked-store") {
            const std::uint32_t first = number(words);
            return gated(first, hashes_of(words), command == "revoked-store");
        }
        if (command == "lookup") return told(client_.lookup(hashes_of(words), false));
        if (command == "load") {
            const std::uint32_t first = number(words);
            return load(client_.lookup(hashes_of(words), true), first);
        }
        if (command == "lease") {
            kept_ = client_.lookup(hashes_of(words), true);
            return told(kept_);
        }
        if (command == "load-leased") return load(kept_, number(words));
        if (command == "start-store") {
            const std::uint32_t first = number(words);
            const auto hashes = hashes_of(words);
            return started(client_.store(hashes, range(first, hashes.size())));
        }
        if (command == "start-load") {
            const std::uint32_t first = number(words);
            const Lookup lookup = client_.lookup(hashes_of(words), true);
            if (!lookup.lease) return told(lookup);
            return started(client_.load(*lookup.lease, range(first, lookup.lease->blocks)));
        }
        if (command == "revoke") return is_over(client_.revoke(*started_)) ? "over" : "not over";
        if (command == "outcome") return told(*started_);
        if (command == "twice") return twice(hashes_of(words));
        if (command == "roundtrip") return roundtrip(number(words));
        if (command == "churn") {
            const std::uint32_t seconds = number(words);
            return churn(seconds, number(words));
        }
        throw std::invalid_argument("no such command: " + command);
    }

   private:
    static std::string word(std::istringstream& words) {
        std::string text;
        if (!(words >> text)) throw std::invalid_argument("an argument is missing");
        return text;
    }
    static std::uint32_t number(std::istringstream& words) { return static_cast<std::uint32_t>(std::stoul(word(words))); }

    std::string ready(std::uint32_t seconds) {
        if (!client_.wait_ready(Milliseconds(1'000 * seconds))) return "not ready: " + client_.last_error();
        return "ready " + std::to_string(client_.epoch());
    }

    // Copies a block between its planes and one run of bytes.
    void gather(std::uint32_t block, std::byte* to) const {
        for (const Plane& plane : kPlanes) to = std::copy_n(at(block, plane), plane.fragment_bytes, to);
    }
    void scatter(const std::byte* from, std::uint32_t block) {
        for (const Plane& plane : kPlanes) {
            std::copy_n(from, plane.fragment_bytes, at(block, plane));
            from += plane.fragment_bytes;
        }
    }
    std::byte* at(std::uint32_t block, const Plane& plane) const {
        if (block >= kBlocks) throw std::invalid_argument("no such block: " + std::to_string(block));
        return memory_.data() + plane.base_offset + block * plane.block_stride_bytes;
    }

    std::string read(const std::string& path, std::uint32_t first) {
        std::ifstream file(path, std::ios::binary);
        const std::string bytes{std::istreambuf_iterator<char>(file), {}};
        const auto blocks = static_cast<std::uint32_t>(bytes.size() / kBlockBytes);
        for (std::uint32_t i = 0; i < blocks; ++i)
            scatter(reinterpret_cast<const std::byte*>(bytes.data()) + i * kBlockBytes, first + i);
        return "read " + std::to_string(blocks);
    }

    std::string write(const std::string& path, std::uint32_t first, std::uint32_t count) {
        std::string bytes(count * kBlockBytes, '\0');
        for (std::uint32_t i = 0; i < count; ++i)
            gather(first + i, reinterpret_cast<std::byte*>(bytes.data()) + i * kBlockBytes);
        std::ofstream(path, std::ios::binary) << bytes;
        return "wrote " + std::to_string(count);
    }

    std::string wipe() {
        std::fill_n(memory_.data(), kMemoryBytes, kWiped);
        return "wiped";
    }

    // Whether every byte that belongs to none of these blocks is as `wipe` has left it.
    bool rest_is_wiped(std::uint32_t first, std::uint32_t count) const {
        std::vector<bool> written(kMemoryBytes);
        for (std::uint32_t block = first; block < first + count; ++block)
            for (const Plane& plane : kPlanes)
                std::fill_n(written.begin() + (at(block, plane) - memory_.data()), plane.fragment_bytes, true);
        for (std::uint64_t i = 0; i < kMemoryBytes; ++i)
            if (!written[i] && memory_.data()[i] != kWiped) return false;
        return true;
    }

    static std::string told(const Lookup& lookup) {
        std::string text = "hits " + std::to_string(lookup.hits) + " states " + digits(lookup.states);
        if (lookup.error) text += " " + Refused::text_of(*lookup.error);
        return text;
    }

    std::string told(Transfer& transfer) {
        if (!client_.wait(transfer, kTransfer)) return "not over";
        if (transfer.refused) return "refused " + Refused::text_of(*transfer.error);
        std::string text = kvtier::v1::TransferState_Name(transfer.state).substr(std::strlen("TRANSFER_STATE_"));
        text += " succeeded " + digits(transfer.succeeded);
        if (transfer.is_store) text += " results " + digits(transfer.results);
        if (transfer.error) text += " " + Refused::text_of(*transfer.error);
        return text;
    }

    std::string load(const Lookup& lookup, std::uint32_t first) {
        if (!lookup.lease) return told(lookup);
        return told(*client_.load(*lookup.lease, range(first, lookup.lease->blocks)));
    }

    std::string started(const std::shared_ptr<Transfer>& transfer) {
        started_ = transfer;
        while (client_.part_state(*transfer) == PartState::armed)
            if (client_.wait(*transfer, Milliseconds(1))) break;
        return client_.part_state(*transfer) == PartState::started ? "started" : told(*transfer);
    }

    std::string gated(std::uint32_t first, const std::vector<std::string>& hashes, bool revoked) {
        const Doorbell bell{.index = 1, .value = ++step_};
        const auto transfer = client_.store(hashes, range(first, hashes.size()), bell);
        if (client_.wait(*transfer, Milliseconds(300))) return "it did not wait: " + told(*transfer);
        if (client_.part_state(*transfer) != PartState::armed) return "it is not armed";
        if (!revoked) {
            client_.ring(bell.index, bell.value);
            return told(*transfer);
        }
        if (client_.revoke(*transfer) != PartState::revoked) return "it could not be revoked";
        return told(*transfer);
    }

    std::string twice(const std::vector<std::string>& hashes) {
        const Lookup lookup = client_.lookup({hashes.at(0), hashes.at(1)}, true);
        if (!lookup.lease || lookup.hits != 2) return "no lease of two: " + told(lookup);
        const std::string text = told(*client_.load(*lookup.lease, {0, 0}));
        client_.release(*lookup.lease);  // a refused load has consumed nothing
        return text;
    }

    std::string roundtrip(std::uint32_t count) {
        std::mt19937_64 random{std::random_device{}()};
        std::vector<std::string> hashes(count, std::string(32, '\0'));
        for (std::string& hash : hashes)
            for (char& byte : hash) byte = static_cast<char>(random());
        for (std::uint64_t i = 0; i < kMemoryBytes; ++i) memory_.data()[i] = static_cast<std::byte>(random());
        std::vector<std::byte> before(count * kBlockBytes), after(count * kBlockBytes);
        for (std::uint32_t i = 0; i < count; ++i) gather(i, before.data() + i * kBlockBytes);

        const std::string stored = told(*client_.store(hashes, range(0, count)));
        if (!stored.starts_with("DONE")) return "store: " + stored;
        wipe();
        const std::uint32_t to = kBlocks - count;  // another place than the blocks came from
        const std::string loaded = load(client_.lookup(hashes, true), to);
        if (!loaded.starts_with("DONE")) return "load: " + loaded;
        for (std::uint32_t i = 0; i < count; ++i) gather(to + i, after.data() + i * kBlockBytes);
        if (before != after) return "other bytes than were stored";
        if (!rest_is_wiped(to, count)) return "bytes outside of the blocks were written";
        return "equal " + std::to_string(before.size()) + " bytes";
    }

    // A transfer that is lost with the daemon is a failed round trip; wrong bytes end the run at once.
    std::string churn(std::uint32_t seconds, std::uint32_t count) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
        int whole = 0, failed = 0;
        while (std::chrono::steady_clock::now() < end) {
            const std::string answer = roundtrip(count);
            if (!answer.starts_with("equal ") && !answer.starts_with("store: ") && !answer.starts_with("load: "))
                return answer;
            ++(answer.starts_with("equal ") ? whole : failed);
            if (failed > 0) client_.wait_ready(Milliseconds(1'000));
        }
        return "whole " + std::to_string(whole) + " failed " + std::to_string(failed);
    }

    SharedMemory memory_;
    Client client_;
    Lookup kept_;
    std::shared_ptr<Transfer> started_ = std::make_shared<Transfer>();
    std::uint64_t step_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
    if (count < 3 || count > 4) {
        std::cerr << "usage: " << arguments[0] << " SOCKET INSTANCE [TENANT]\n";
        return 2;
    }
    Program program(arguments[1], arguments[2], count == 4 ? arguments[3] : "");
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string command;
        if (!(words >> command)) continue;
        if (command == "quit") break;
        try {
            std::cout << program.run(command, words) << std::endl;
        } catch (const std::exception& error) {
            std::cout << "error: " << error.what() << std::endl;
        }
    }
}
