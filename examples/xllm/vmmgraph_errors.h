#pragma once

#include <glog/logging.h>

#include <exception>
#include <string_view>
#include <vmmgraph/base.hpp>

namespace xllm {

// Sends VmmGraph's log lines to glog.
inline void log_vmmgraph_by_glog() {
  vmmgraph::set_log_sink([](vmmgraph::LogLevel level, std::string_view text) {
    if (level == vmmgraph::LogLevel::error) {
      LOG(ERROR) << text;
    } else if (level == vmmgraph::LogLevel::warn) {
      LOG(WARNING) << text;
    } else {
      LOG(INFO) << text;
    }
  });
}

// Terminates the process on an exception, as xLLM does for a failed capture.
template <class F>
auto or_fatal(F&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    LOG(FATAL) << error.what();
    throw;
  }
}

}  // namespace xllm
