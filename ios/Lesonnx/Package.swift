// swift-tools-version: 6.0
import PackageDescription

// Fused multiply-adds are written out in the kernel: a compiler that made its own would change bits between builds. Its sources tell
// clang so. Elsewhere it is also always optimised, since a debug build would be fifty times slower; Xcode takes no package with
// such flags into an app.
var kernelSettings: [CSetting] = [
    .define("_DEFAULT_SOURCE"), .define("RegisterCustomOps", to: "lesonnx_register_experts"),
]
#if !canImport(Darwin)
kernelSettings.append(.unsafeFlags(["-O3", "-ffp-contract=off"]))
#endif

// The targets are the floors: an import goes only to a floor above in this list.
let package = Package(
    name: "Lesonnx",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "Lesonnx", targets: ["Lesonnx"]),
        .library(name: "LesonnxScheduler", targets: ["LesonnxScheduler"]),
        .library(name: "LesonnxStore", targets: ["LesonnxStore"]),
    ],
    targets: [
        // Pure: what a bundle says, which expert is loaded when, which token is drawn. No threads, no clock, no ONNX Runtime.
        .target(name: "LesonnxScheduler"),
        // How bundles come to the device: import, download, checksums, fit.
        .target(name: "LesonnxStore", dependencies: ["LesonnxScheduler"]),
        // The expert kernel: lesonnx/native, by a link.
        .target(
            name: "CLesonnx", exclude: ["CMakeLists.txt", "__init__.py", "library.py"], cSettings: kernelSettings),
        // ONNX Runtime's C interface, linked or loaded.
        .target(name: "COnnxRuntime"),
        // The runtime: sessions, experts in memory, steps, tokens.
        .target(name: "Lesonnx", dependencies: ["LesonnxScheduler", "CLesonnx", "COnnxRuntime"]),
        // The command line, for trying and measuring.
        .executableTarget(name: "lesonnx-swift", dependencies: ["Lesonnx", "LesonnxStore"]),
        .testTarget(name: "LesonnxSchedulerTests", dependencies: ["LesonnxScheduler"]),
        .testTarget(name: "LesonnxStoreTests", dependencies: ["LesonnxStore"]),
        .testTarget(name: "LesonnxTests", dependencies: ["Lesonnx"], exclude: ["Vectors"]),
        .testTarget(name: "CommandTests", dependencies: ["lesonnx-swift"]),
    ],
    cLanguageStandard: .c11
)

#if canImport(Darwin)
// Apple's platforms link ONNX Runtime from its own Swift package; Linux loads a library, so its builds need no network.
package.dependencies.append(
    .package(url: "https://github.com/microsoft/onnxruntime-swift-package-manager", exact: "1.24.2"))
for target in package.targets where target.name == "COnnxRuntime" {
    target.dependencies.append(.product(name: "onnxruntime", package: "onnxruntime-swift-package-manager"))
}
#endif
