// What Android Studio uses; pom.xml builds and tests the same sources on a JVM. Versions stand in gradle/libs.versions.toml.
plugins {
    alias(libs.plugins.android.library)
    alias(libs.plugins.kotlin.serialization)
}

android {
    namespace = "dev.lesonnx"
    compileSdk = libs.versions.compile.sdk.get().toInt()
    ndkVersion = libs.versions.ndk.get()

    defaultConfig {
        minSdk = libs.versions.min.sdk.get().toInt()
        consumerProguardFiles("consumer-rules.pro")
        ndk {
            // Phones and tablets, and the emulator. The kernel chooses its instruction set at run time.
            abiFilters += listOf("arm64-v8a", "x86_64")
        }
        externalNativeBuild {
            cmake {
                // C alone, so no C++ library comes along. Pages of 16 KB are the default of NDK 28; older ones need the word.
                arguments += listOf("-DANDROID_STL=none", "-DANDROID_SUPPORT_FLEXIBLE_PAGE_SIZES=ON")
            }
        }
    }

    externalNativeBuild {
        cmake {
            path = file("src/main/cpp/CMakeLists.txt")
            version = libs.versions.cmake.get()
        }
    }

    sourceSets {
        getByName("main") {
            // src/main is the core, without a class of Android; src/jvm is the JVM's own and stays out.
            kotlin.directories += "src/android/kotlin"
        }
    }

    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

dependencies {
    // Apps see its types nowhere in this library's API, but may want the same version for models of their own.
    api(libs.onnxruntime.android)
    api(libs.kotlinx.coroutines.core)
    implementation(libs.kotlinx.serialization.json)
}
