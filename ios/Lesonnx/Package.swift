// swift-tools-version: 6.0
import PackageDescription

// The targets are the floors: an import goes only to a floor above in this list.
let package = Package(
    name: "Lesonnx",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "LesonnxScheduler", targets: ["LesonnxScheduler"]),
        .library(name: "LesonnxStore", targets: ["LesonnxStore"]),
    ],
    targets: [
        // Pure: what a bundle says, which expert is loaded when, which token is drawn. No threads, no clock, no ONNX Runtime.
        .target(name: "LesonnxScheduler"),
        // How bundles come to the device: import, download, checksums, fit.
        .target(name: "LesonnxStore", dependencies: ["LesonnxScheduler"]),
        // The command line, for trying and measuring.
        .executableTarget(name: "lesonnx-swift", dependencies: ["LesonnxScheduler"]),
        .testTarget(name: "LesonnxSchedulerTests", dependencies: ["LesonnxScheduler"]),
        .testTarget(name: "LesonnxStoreTests", dependencies: ["LesonnxStore"]),
    ]
)
