plugins {
    alias(libs.plugins.android.application)
}

android {
    namespace = "dev.lesonnx.app"
    compileSdk = libs.versions.compile.sdk.get().toInt()

    defaultConfig {
        applicationId = "dev.lesonnx.app"
        minSdk = libs.versions.min.sdk.get().toInt()
        targetSdk = libs.versions.target.sdk.get().toInt()
        versionCode = 1
        versionName = "0.1.0"
        ndk {
            abiFilters += listOf("arm64-v8a", "x86_64")
        }
    }

    buildTypes {
        release {
            // ONNX Runtime's native code finds its Java classes by name, and the app is small without shrinking.
            isMinifyEnabled = false
        }
    }

    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }

    packaging {
        jniLibs {
            // Libraries stay uncompressed in the APK and are mapped from there, on pages of 16 KB.
            useLegacyPackaging = false
        }
    }
}

dependencies {
    implementation(project(":lesonnx"))
    implementation(libs.kotlinx.coroutines.core)
    implementation(libs.kotlinx.coroutines.android)
}
