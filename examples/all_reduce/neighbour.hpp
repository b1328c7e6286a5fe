// Exchanges memory with the process at the far end of a socket. Each page is exported and imported
// once, for any number of ranges on it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <stdexcept>
#include <vector>

#include <vmmgraph/share.hpp>

namespace all_reduce_example {

class Neighbour {
public:
    // `socket`: connected, and preserves message boundaries (SOCK_SEQPACKET).
    Neighbour(const vmmgraph::Device& device, int socket) : device_(device), socket_(socket) {}

    // Adds a range (from export_range()) for the peer. Both sides must add the same number of
    // ranges in the same order.
    void offer(const std::vector<vmmgraph::PageExtent>& range) {
        for (const auto& extent : range) {
            const auto found =
                numbers_.try_emplace(extent.page, static_cast<std::uint32_t>(exported_.size()));
            if (found.second) {
                exported_.emplace_back(device_, extent.page);
            }
            parts_.push_back(
                {ranges_, found.first->second, extent.offset, extent.bytes, extent.page_bytes});
        }
        ++ranges_;
    }

    // Sends the ranges, and returns the addresses of the peer's ranges in this process, in the
    // peer's order.
    std::vector<void*> swap() {
        std::vector<int> descriptors;
        for (const auto& page : exported_) {
            descriptors.push_back(page.descriptor());
        }
        vmmgraph::send_descriptors(socket_, descriptors, parts_.data(),
                                   parts_.size() * sizeof(Part));
        std::array<Part, 512> theirs{};
        const auto received = vmmgraph::receive_descriptors(socket_, theirs.data(), sizeof theirs);
        std::map<std::uint32_t, vmmgraph::PeerPage> pages;
        std::vector<std::vector<vmmgraph::PeerExtent>> ranges(ranges_);
        for (std::size_t i = 0; i < received.bytes / sizeof(Part); ++i) {
            const Part& part = theirs.at(i);
            const auto page =
                pages
                    .try_emplace(part.page, device_, received.descriptors.at(part.page).get(),
                                 part.page_bytes)
                    .first;
            ranges.at(part.range).push_back({&page->second, part.offset, part.bytes});
        }
        std::vector<void*> addresses;
        for (const auto& range : ranges) {
            addresses.push_back(spans_.emplace_back(device_, range).address());
        }
        return addresses;
    }

    // Waits until the peer also calls meet().
    void meet() const {
        char byte = 0;
        vmmgraph::send_descriptors(socket_, {}, &byte, 1);
        if (vmmgraph::receive_descriptors(socket_, &byte, 1).bytes == 0) {
            throw std::runtime_error("the other process is gone");
        }
    }

private:
    struct Part {
        std::uint32_t range, page;
        std::uint64_t offset, bytes, page_bytes;
    };

    const vmmgraph::Device& device_;
    int socket_;
    std::uint32_t ranges_ = 0;
    std::map<std::uint64_t, std::uint32_t> numbers_;
    std::deque<vmmgraph::ExportedPage> exported_;
    std::vector<Part> parts_;
    std::deque<vmmgraph::PeerMap> spans_;
};

}  // namespace all_reduce_example
