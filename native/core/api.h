// What a shared object offers to others. All else in it is its own.
#pragma once

#if defined(_WIN32)
#define REGARD_API extern "C" __declspec(dllexport)
#else
#define REGARD_API extern "C" __attribute__((visibility("default")))
#endif
